"""Settings: pydantic schemas, TOML files and `--set a.b=c`. The only reader of the server's environment."""

from agentjet.config.load import load_config, parse_job, server_token
from agentjet.config.schema import (
    AlgorithmConfig,
    JobConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    SamplerConfig,
    ServeConfig,
    ServerConfig,
    SideCallRule,
)
from agentjet.config.table import setting_names, settings_table

__all__ = [
    "AlgorithmConfig",
    "JobConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "SamplerConfig",
    "ServeConfig",
    "ServerConfig",
    "SideCallRule",
    "load_config",
    "parse_job",
    "server_token",
    "setting_names",
    "settings_table",
]
