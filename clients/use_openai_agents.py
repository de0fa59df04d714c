"""OpenAI's Agents SDK: a conversation with a tool, over `/v1/responses` and over chats."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import WEATHER, check, main
from openai import AsyncOpenAI

set_tracing_disabled(True)
calls = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    calls.append(city)
    return f"sunny in {city}"


def agent(kind, url, model):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    settings = ModelSettings(tool_choice="required", temperature=0, max_tokens=64)
    return Agent("helper", tools=[get_weather], model=kind(model, client), model_settings=settings)


def conversation(kind, url, model):
    """The model must call the tool once; then it may answer."""
    calls.clear()
    result = asyncio.run(Runner.run(agent(kind, url, model), WEATHER[0]["content"], max_turns=4))
    assert calls and result.final_output and len(result.to_input_list()) >= 4, result
    return f"get_weather({calls[0]!r}), then {result.final_output[:60]!r}"


@check
def responses(url, model, tokenizer):
    return conversation(OpenAIResponsesModel, url, model)


@check
def chats(url, model, tokenizer):
    return conversation(OpenAIChatCompletionsModel, url, model)


@check
def streamed_responses(url, model, tokenizer):
    async def run():
        calls.clear()
        result = Runner.run_streamed(agent(OpenAIResponsesModel, url, model), WEATHER[0]["content"], max_turns=4)
        kinds = {event.type async for event in result.stream_events()}
        return kinds, result.final_output

    kinds, output = asyncio.run(run())
    assert calls and output and {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
    return f"get_weather({calls[0]!r}), then {output[:60]!r}"


main()
