// Adds two numbers with OpenAI's SDK: node agent.mjs 17 25. It knows nothing of training: the SDK takes the model's
// address and key from OPENAI_BASE_URL and OPENAI_API_KEY, as it does for any other model.
import OpenAI from "openai";

const [a, b] = process.argv.slice(2);
const completion = await new OpenAI().chat.completions.create({
  model: process.env.OPENAI_MODEL ?? "policy",
  messages: [{ role: "user", content: `What is ${a} + ${b}? Reply with only the equation.` }],
  max_completion_tokens: 12,
});
console.log(completion.choices[0].message.content);
