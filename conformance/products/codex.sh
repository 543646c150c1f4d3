mkdir -p "$HOME/.codex"
cat > "$HOME/.codex/config.toml" <<END
model_provider = "agentjet"
check_for_update_on_startup = false
analytics.enabled = false
features = { apps = false, plugins = false }

[model_providers.agentjet]
name = "AgentJet"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model "$OPENAI_MODEL" "$1"
