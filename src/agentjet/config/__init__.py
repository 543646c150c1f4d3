"""Settings: the schema, its loader and its reference. The only package of the server that reads the environment."""

from agentjet.config.loader import (
    changed_settings,
    check_models,
    first_mistake,
    load_config,
    parse_config,
    server_token,
    settings_table,
    teacher_key,
)
from agentjet.config.schema import (
    ComputeConfig,
    JobConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    SamplerConfig,
    SamplerLimits,
    ServeConfig,
    ServerConfig,
    SideCallRule,
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
    "SamplerLimits",
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
    "teacher_key",
]
