// Vercel's AI SDK: text, streams, objects and tools, over /v1/responses, over chats and over /v1/messages.

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, model] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: 'unused' });
const models = {
  responses: openai.responses(model),
  chats: openai.chat(model),
  'openai-compatible': createOpenAICompatible({ name: 'jaxspec', baseURL, supportsStructuredOutputs: true })(model),
  messages: createAnthropic({ baseURL, apiKey: 'unused' })(model),
};
const settings = { temperature: 0, maxOutputTokens: 96, maxRetries: 0 };
const prompt = 'What is the capital of France?';

async function check(name, run) {
  const began = Date.now();
  let ok = true, said;
  try { said = await run(); } catch (error) { ok = false; said = `${error.name}: ${error.message}`; }
  console.log(JSON.stringify({ check: name, seconds: (Date.now() - began) / 1000, ok, said: said.replace(/\s+/g, ' ') }));
}

function assert(holds, what) { if (!holds) throw new Error(`not so: ${what}`); }

for (const [name, model] of Object.entries(models)) {
  await check(`${name} text and stream`, async () => {
    const { text } = await generateText({ model, prompt, ...settings });
    assert(text.includes('Paris'), text);
    let streamed = '', parts = 0;
    for await (const part of streamText({ model, prompt, ...settings }).textStream) { streamed += part; parts += 1; }
    assert(streamed === text && parts > 1, streamed);
    return `${text} (${parts} parts)`;
  });
  await check(`${name} object`, async () => {
    const schema = z.object({ name: z.string(), country: z.string() });
    const output = Output.object({ schema });
    const made = await generateText({ model, output, prompt: 'Describe Paris.', ...settings });
    return JSON.stringify(schema.parse(made.output));
  });
  await check(`${name} tool`, async () => {
    const called = [];
    const getWeather = tool({
      description: 'The weather in a city.',
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => { called.push(city); return `sunny in ${city}`; },
    });
    const { steps, text } = await generateText({
      model, tools: { getWeather }, prompt: 'What is the weather in Paris?', ...settings,
      stopWhen: stepCountIs(3), prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'none' : 'required' }),
    });
    assert(called.length > 0 && steps.length > 1, JSON.stringify(steps));
    return `getWeather(${called[0]}), then ${text.slice(0, 60)}`;
  });
}
