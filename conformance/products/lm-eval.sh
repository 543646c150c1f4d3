# $1 is a folder with the model's tokenizer: lm-eval tokenizes texts itself. The tasks are two made here.
mkdir tasks
echo '{"question": "The opposite of hot is", "answers": [" cold", " hello", " the sea"], "right": 0}' >tasks/questions.jsonl
cat >tasks/choice.yaml <<END
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: $PWD/tasks/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{answers}}"
doc_to_target: right
target_delimiter: ""
END
cat >tasks/word.yaml <<END
task: word
dataset_path: json
dataset_kwargs: {data_files: {test: $PWD/tasks/questions.jsonl}}
test_split: test
output_type: generate_until
generation_kwargs: {until: ["\n"], max_gen_toks: 20}
doc_to_text: "{{question}}"
doc_to_target: "cold"
metric_list: [{metric: exact_match}]
END
lm_eval run --model local-completions --tasks choice,word --include_path tasks --output_path results --log_samples \
  --model_args "base_url=$OPENAI_BASE_URL/completions,model=$OPENAI_MODEL,tokenizer=$1,num_concurrent=1,max_retries=1"
