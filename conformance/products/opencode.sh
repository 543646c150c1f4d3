# Whatever the model's name is, `policy` is one of it. OPENCODE_CONFIG_CONTENT is read as a configuration file.
export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_DEFAULT_PLUGINS=1 OPENCODE_PURE=1
export OPENCODE_CONFIG_CONTENT='{
  "share": "disabled",
  "provider": {"agentjet": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"policy": {}}
  }}
}'
opencode run --model agentjet/policy "$1"
