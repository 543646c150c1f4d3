"""Settings: the schema, its loader and its reference. The only package of the server that reads the environment."""

from agentjet.config.job import JobConfig, OptimizerConfig, SideCallRule, unknown_policy
from agentjet.config.loader import check_models, first_mistake, load_config, parse_config, server_token
from agentjet.config.reference import changed_settings, settings_table
from agentjet.config.schema import (
    ComputeConfig,
    LoraConfig,
    ModelConfig,
    PolicyConfig,
    SamplerConfig,
    ServeConfig,
    ServerConfig,
    bfloat16_is_faster,
)

__all__ = [
    "ComputeConfig",
    "JobConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "SamplerConfig",
    "ServeConfig",
    "ServerConfig",
    "SideCallRule",
    "bfloat16_is_faster",
    "changed_settings",
    "parse_config",
    "check_models",
    "first_mistake",
    "load_config",
    "server_token",
    "settings_table",
    "unknown_policy",
]
