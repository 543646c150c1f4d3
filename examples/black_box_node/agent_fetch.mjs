// The same agent without a package: node agent_fetch.mjs 17 25. Whatever speaks HTTP will do.
const [a, b] = process.argv.slice(2);
const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
  method: "POST",
  headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" },
  body: JSON.stringify({
    model: process.env.OPENAI_MODEL ?? "policy",
    messages: [{ role: "user", content: `What is ${a} + ${b}? Reply with only the equation.` }],
    max_completion_tokens: 12,
  }),
});
if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
console.log((await response.json()).choices[0].message.content);
