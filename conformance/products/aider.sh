export AIDER_ANALYTICS=false AIDER_CHECK_UPDATE=false AIDER_SHOW_RELEASE_NOTES=false AIDER_GITIGNORE=false
cat > "$HOME/.aider.model.metadata.json" <<END
{"openai/$OPENAI_MODEL": {"max_input_tokens": 32768, "max_output_tokens": 4096, "litellm_provider": "openai", "mode": "chat"}}
END
cat > "$HOME/.aider.model.settings.yml" <<END
- name: openai/$OPENAI_MODEL
  edit_format: diff
  use_temperature: false
END
aider --yes-always --no-git --no-pretty --model "openai/$OPENAI_MODEL" --auto-test --test-cmd "$2" --message "$1" greeting.txt
