"""litellm, with the server as `openai/MODEL`, as `hosted_vllm/MODEL` and, by the Messages API, `anthropic/MODEL`."""

import json
from functools import partial

import litellm
from checks import FRANCE, WEATHER, WEATHER_TOOL, check, main, weather_arguments

litellm.telemetry = False


def ask(url, model, provider="openai", **settings):
    settings = {"messages": FRANCE, "max_tokens": 96} | settings
    base = url if provider == "anthropic" else f"{url}/v1"
    place = {"api_base": base, "api_key": "unused", "timeout": 300, "num_retries": 0}
    return litellm.completion(model=f"{provider}/{model}", temperature=0, **place, **settings)


@check
def chat(url, model, tokenizer):
    providers = "openai", "hosted_vllm", "anthropic"
    texts = {ask(url, model, provider).choices[0].message.content for provider in providers}
    assert len(texts) == 1 and "Paris" in texts.copy().pop()
    return texts.pop()


@check
def chat_streamed(url, model, tokenizer):
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(url, model, stream=True)]
    assert "Paris" in "".join(parts)
    return f"{len(parts)} chunks"


@check
def tools_required(url, model, tokenizer):
    reply = ask(url, model, messages=WEATHER, tools=[WEATHER_TOOL], tool_choice="required")
    return weather_arguments(json.loads(reply.choices[0].message.tool_calls[0].function.arguments))


@check
def messages(url, model, tokenizer):
    """Over /v1/messages: a stream, a forced call, its result, and a schema."""
    of = partial(ask, url, model, "anthropic")
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in of(stream=True))
    call = of(messages=WEATHER, tools=[WEATHER_TOOL], tool_choice="required").choices[0].message
    said = weather_arguments(json.loads(call.tool_calls[0].function.arguments))
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "Sunny."}
    assert of(messages=[*WEATHER, call.model_dump(), result], tools=[WEATHER_TOOL], max_tokens=8).usage.prompt_tokens
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema | {"additionalProperties": False}}}
    assert json.loads(of(response_format=form).choices[0].message.content)["city"]
    return said


main()
