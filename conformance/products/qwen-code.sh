mkdir -p "$HOME/.qwen"
cat > "$HOME/.qwen/settings.json" <<END
{
  "general": {"enableAutoUpdate": false},
  "memory": {"enableManagedAutoMemory": false, "enableManagedAutoDream": false},
  "privacy": {"usageStatisticsEnabled": false},
  "telemetry": {"enabled": false}
}
END
qwen --auth-type openai --model "$OPENAI_MODEL" --yolo --prompt "$1"
