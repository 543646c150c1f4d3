// An agent on Vercel's AI SDK: `node ai.mjs chat | streaming | responses | references | object`.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const QUESTIONS = ["What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once."];
const inputSchema = z.object({ a: z.number(), b: z.number() });
const tools = {
  add: tool({ description: "add two numbers", inputSchema, execute: ({ a, b }) => a + b }),
  multiply: tool({ description: "multiply two numbers", inputSchema, execute: ({ a, b }) => a * b }),
};
const provider = createOpenAI();
const way = process.argv[2];
const name = process.env.OPENAI_MODEL;
const model = ["responses", "references"].includes(way) ? provider.responses(name) : provider.chat(name);
const settings = { model, tools, stopWhen: stepCountIs(5) };
// Unless told that nothing is stored, the SDK sends references to what was said instead of the items.
if (way === "responses") settings.providerOptions = { openai: { store: false } };

async function converse() {
  const messages = [];
  let text;
  for (const content of QUESTIONS) {
    messages.push({ role: "user", content });
    if (["streaming", "references"].includes(way)) {
      const result = streamText({ ...settings, messages });
      for await (const _ of result.textStream);
      text = await result.text;
      messages.push(...(await result.response).messages);
    } else {
      const result = await generateText({ ...settings, messages });
      text = result.text;
      messages.push(...result.response.messages);
    }
  }
  return text;
}

// Structured output after a tool was used.
async function object() {
  const schema = z.object({ total: z.number(), currency: z.string() });
  const { output } = await generateText({ ...settings, prompt: QUESTIONS[0], output: Output.object({ schema }) });
  return `${output.total} ${output.currency}`;
}

console.log(await (way === "object" ? object() : converse()));
