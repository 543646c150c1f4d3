# Writes the task's files and starts Claude Code on its prompt: `sh claude.sh`, within an episode of `agentjet run`.
# It may take three turns. An attempt that needs more, or whose answers do not end, is scored. Every other failure aborts.
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_ATTRIBUTION_HEADER=0 DISABLE_AUTOUPDATER=1
python3 -c 'import json, os; [open(name, "w").write(text) for name, text in json.loads(os.environ["AGENTJET_TASK"])["files"].items()]'
prompt=$(python3 -c 'import json, os; print(json.loads(os.environ["AGENTJET_TASK"])["prompt"])')
system='You run commands with the Bash tool. Asked to run "date >now.txt", you answer:
<tool_call>
{"name": "Bash", "arguments": {"command": "date >now.txt"}}
</tool_call>
When the tool has answered, you say "Done."'
claude --print --bare --tools Bash --permission-mode acceptEdits --allowed-tools Bash \
  --system-prompt "$system" \
  --max-turns 3 --output-format json --model "$ANTHROPIC_MODEL" -- "$prompt" >result.json ||
  grep -Eq '"error_max_turns"|"api_error":"max_output_tokens"' result.json
