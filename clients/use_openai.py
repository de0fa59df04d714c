"""The official OpenAI client: chats, streams, tools, structured output, responses, completions."""

import json

import openai
from checks import FRANCE, TIME_TOOL, WEATHER, WEATHER_TOOL, check, main, weather_arguments
from pydantic import BaseModel


class City(BaseModel):
    name: str
    country: str
    population: int


def chats(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=300).chat.completions


@check
def chat(url, model, tokenizer):
    reply = chats(url).create(model=model, messages=FRANCE, temperature=0, max_tokens=32)
    assert "Paris" in reply.choices[0].message.content and reply.usage.completion_tokens
    return reply.choices[0].message.content


@check
def chat_streamed(url, model, tokenizer):
    asked = {"model": model, "messages": FRANCE, "temperature": 0, "max_tokens": 32}
    whole = chats(url).create(**asked)
    chunks = list(chats(url).create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    return f"{len(chunks)} chunks, the text of the whole"


@check
def tools_auto(url, model, tokenizer):
    reply = chats(url).create(model=model, messages=WEATHER, tools=[WEATHER_TOOL], temperature=0, max_tokens=64)
    message = reply.choices[0].message
    assert message.content or message.tool_calls
    return "called" if message.tool_calls else f"answered {message.content[:40]!r}"


def call(reply):
    (choice,) = reply.choices
    assert choice.finish_reason in ("tool_calls", "stop"), choice.finish_reason
    calls = choice.message.tool_calls
    assert calls and all(each.id and each.type == "function" for each in calls)
    return calls


@check
def tools_required(url, model, tokenizer):
    asked = {"tools": [WEATHER_TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 96}
    first, *_ = call(chats(url).create(model=model, messages=WEATHER, **asked))
    return weather_arguments(json.loads(first.function.arguments))


@check
def tool_named(url, model, tokenizer):
    named = {"type": "function", "function": {"name": "get_weather"}}
    asked = {"tools": [TIME_TOOL, WEATHER_TOOL], "tool_choice": named, "temperature": 0, "max_tokens": 96}
    (only,) = call(chats(url).create(model=model, messages=WEATHER, **asked))
    return weather_arguments(json.loads(only.function.arguments))


@check
def tools_streamed(url, model, tokenizer):
    asked = {"tools": [WEATHER_TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 96}
    whole = call(chats(url).create(model=model, messages=WEATHER, **asked))
    names, arguments, parts = {}, {}, 0
    for chunk in chats(url).create(model=model, messages=WEATHER, stream=True, **asked):
        for piece in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            names.setdefault(piece.index, piece.function.name)
            arguments[piece.index] = arguments.get(piece.index, "") + (piece.function.arguments or "")
            parts += 1
    streamed = [(names[i], arguments[i]) for i in sorted(names)]
    assert streamed == [(each.function.name, each.function.arguments) for each in whole], streamed
    return f"{parts} pieces, the calls of the whole"


@check
def tools_parallel(url, model, tokenizer):
    both = [{"role": "user", "content": "What are the weather in Paris in celsius, and the time in Tokyo?"}]
    asked = {"tools": [WEATHER_TOOL, TIME_TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 192}
    several = call(chats(url).create(model=model, messages=both, parallel_tool_calls=True, **asked))
    alone = call(chats(url).create(model=model, messages=both, parallel_tool_calls=False, **asked))
    assert len(alone) == 1 and all(json.loads(each.function.arguments) for each in (*several, *alone))
    return f"{len(several)} calls; without parallel_tool_calls 1"


@check
def tool_result_sent_back(url, model, tokenizer):
    asked = {"tools": [WEATHER_TOOL], "temperature": 0, "max_tokens": 96}
    first = chats(url).create(model=model, messages=WEATHER, tool_choice="required", **asked).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": '{"sky": "sunny", "degrees": 21}'}
        for each in first.tool_calls
    ]
    reply = chats(url).create(model=model, messages=[*WEATHER, first, *results], **asked)
    assert reply.choices[0].message.content or reply.choices[0].message.tool_calls
    return repr((reply.choices[0].message.content or "another call")[:60])


@check
def parse_with_pydantic(url, model, tokenizer):
    ask = [{"role": "user", "content": "Describe Paris: name, country and population."}]
    reply = chats(url).parse(model=model, messages=ask, response_format=City, temperature=0, max_tokens=96)
    assert isinstance(reply.choices[0].message.parsed, City)
    return repr(reply.choices[0].message.parsed)


@check
def json_object(url, model, tokenizer):
    ask = [{"role": "user", "content": "Describe Paris as JSON."}]
    format = {"response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 192}
    choice = chats(url).create(model=model, messages=ask, **format).choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    return f"{choice.finish_reason}: {choice.message.content[:60]}"


@check
def responses(url, model, tokenizer):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=300)
    asked = {"model": model, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 32}
    whole = client.responses.create(**asked)
    assert "Paris" in whole.output_text
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    return whole.output_text


@check
def completions_scored(url, model, tokenizer):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=300)
    asked = {"prompt": "Paris is the capital of France", "max_tokens": 0, "echo": True, "logprobs": 1}
    logprobs = client.completions.create(model=model, **asked).choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and all(value < 0 for value in logprobs.token_logprobs[1:])
    return f"{sum(logprobs.token_logprobs[1:]):.3f} nats"


main()
