"""The official Anthropic client: messages whole, streamed and asynchronous, tools, counts, models, errors."""

import asyncio

import anthropic
from checks import FRANCE, WEATHER, WEATHER_TOOL, check, main, weather_arguments

FUNCTION = WEATHER_TOOL["function"]
TOOL = {key: FUNCTION[key] for key in ("name", "description")} | {"input_schema": FUNCTION["parameters"]}
GREEDY = {"extra_body": {"temperature": 0}}  # the client has no argument for it since version 2


def client(url, kind=anthropic.Anthropic):
    return kind(base_url=url, api_key="unused", max_retries=0, timeout=300)


@check
def message_whole_and_streamed(url, model, tokenizer):
    asked = {"model": model, "max_tokens": 32, "messages": FRANCE, **GREEDY}
    whole = client(url).messages.create(**asked)
    with client(url).messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text and "Paris" in text
    assert whole.stop_reason == last.stop_reason == "end_turn" and last.usage.cache_read_input_tokens > 0
    return f"{text} {last.usage.cache_read_input_tokens} tokens cached"


@check
def asynchronous(url, model, tokenizer):
    asked = {"model": "claude-haiku-4-5", "max_tokens": 4, "messages": FRANCE, **GREEDY}
    reply = asyncio.run(client(url, anthropic.AsyncAnthropic).messages.create(**asked))
    assert reply.model == model and reply.stop_reason == "max_tokens"
    return f"{asked['model']} is {reply.model}"


@check
def stop_sequence(url, model, tokenizer):
    asked = {"model": model, "max_tokens": 32, "messages": FRANCE, "stop_sequences": [" is"], **GREEDY}
    reply = client(url).messages.create(**asked)
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", " is")
    return reply.content[0].text


@check
def tools(url, model, tokenizer):
    asked = {"model": model, "max_tokens": 128, "messages": WEATHER, "tools": [TOOL], **GREEDY}
    choice = {"type": "tool", "name": TOOL["name"], "disable_parallel_tool_use": True}
    with client(url).messages.stream(**asked, tool_choice=choice) as stream:
        reply = stream.get_final_message()
    (call,) = reply.content
    assert reply.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
    turns = [*WEATHER, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    assert client(url).messages.create(**asked | {"messages": turns}).content
    return weather_arguments(call.input)


@check
def tool_runner(url, model, tokenizer):
    """The runner asks for a thread first, and sends whole conversations once that is refused."""
    called = []

    @anthropic.beta_tool(name=TOOL["name"], description=TOOL["description"], input_schema=TOOL["input_schema"])
    def weather(**arguments):
        called.append(weather_arguments(arguments))
        return "sunny, 21 degrees"

    choice = {"type": "tool", "name": TOOL["name"], "disable_parallel_tool_use": True}
    asked = {"model": model, "max_tokens": 128, "messages": WEATHER, "tools": [weather], "tool_choice": choice}
    turns = list(client(url).beta.messages.tool_runner(**asked, max_iterations=2, **GREEDY))
    assert len(turns) == 2 and called
    return called[0]


@check
def count_tokens_and_models(url, model, tokenizer):
    count = client(url).messages.count_tokens(model=model, messages=FRANCE, tools=[TOOL]).input_tokens
    assert model in [each.id for each in client(url).models.list()]
    return f"{count} tokens"


@check
def long_prompt(url, model, tokenizer):
    try:
        client(url).messages.create(model=model, max_tokens=4, messages=[{"role": "user", "content": "a b " * 90_000}])
    except anthropic.BadRequestError as error:
        said = error.body["error"]["message"]
        assert said.startswith("prompt is too long: ") and error.request_id
        return said
    raise AssertionError("a prompt longer than the context was answered")


main()
