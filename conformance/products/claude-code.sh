export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_ATTRIBUTION_HEADER=0 DISABLE_AUTOUPDATER=1
claude --print --permission-mode acceptEdits --allowed-tools Bash --model "$ANTHROPIC_MODEL" "$1"
