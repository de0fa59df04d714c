"""litellm, with the server as `openai/MODEL` and as `hosted_vllm/MODEL`."""

import json

import litellm
from checks import FRANCE, WEATHER, WEATHER_TOOL, check, main, weather_arguments

litellm.telemetry = False


def ask(url, model, provider="openai", **settings):
    settings = {"messages": FRANCE, "max_tokens": 96} | settings
    place = {"api_base": f"{url}/v1", "api_key": "unused", "timeout": 300, "num_retries": 0}
    return litellm.completion(model=f"{provider}/{model}", temperature=0, **place, **settings)


@check
def chat(url, model, tokenizer):
    texts = {ask(url, model, provider).choices[0].message.content for provider in ("openai", "hosted_vllm")}
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


main()
