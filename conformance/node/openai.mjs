// An agent on OpenAI's SDK for Node: `node openai.mjs chat | runner | responses`.
import OpenAI from "openai";

const QUESTIONS = ["What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once."];
const FUNCTIONS = { add: ({ a, b }) => String(a + b), multiply: ({ a, b }) => String(a * b) };
const parameters = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
  additionalProperties: false,
};
const described = Object.keys(FUNCTIONS).map((name) => ({ name, description: `${name} two numbers`, parameters }));
const client = new OpenAI();

async function chat() {
  const messages = [];
  const tools = described.map((tool) => ({ type: "function", function: tool }));
  let message;
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    do {
      ({ message } = (await client.chat.completions.create({ model: process.env.OPENAI_MODEL, messages, tools })).choices[0]);
      messages.push(message);
      for (const call of message.tool_calls ?? []) {
        const content = FUNCTIONS[call.function.name](JSON.parse(call.function.arguments));
        messages.push({ role: "tool", tool_call_id: call.id, content });
      }
    } while (message.tool_calls?.length);
  }
  return message.content;
}

// The SDK's own loop, which streams.
async function runner() {
  let messages = [];
  let answer;
  const tools = described.map((tool) => ({
    type: "function",
    function: { ...tool, function: FUNCTIONS[tool.name], parse: JSON.parse },
  }));
  for (const content of QUESTIONS) {
    messages.push({ role: "user", content });
    const run = client.chat.completions.runTools({ model: process.env.OPENAI_MODEL, messages, tools, stream: true });
    answer = await run.finalContent();
    messages = [...run.messages];
  }
  return answer;
}

async function responses() {
  const input = [];
  const tools = described.map((tool) => ({ type: "function", ...tool, strict: false }));
  let response;
  for (const question of QUESTIONS) {
    input.push({ role: "user", content: question });
    let calls;
    do {
      response = await client.responses.create({ model: process.env.OPENAI_MODEL, input, tools, store: false });
      input.push(...response.output);
      calls = response.output.filter((item) => item.type === "function_call");
      for (const call of calls) {
        const output = FUNCTIONS[call.name](JSON.parse(call.arguments));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    } while (calls.length);
  }
  return response.output_text;
}

console.log(await { chat, runner, responses }[process.argv[2]]());
