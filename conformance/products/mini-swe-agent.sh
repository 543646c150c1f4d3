export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors
mini --yolo --exit-immediately --model "openai/$OPENAI_MODEL" --task "$1"
