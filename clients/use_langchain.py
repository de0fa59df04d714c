"""LangChain's ChatOpenAI and ChatAnthropic: invoke, stream, tools, structured output."""

from checks import WEATHER, check, main, weather_arguments
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str
    country: str


@tool
def get_weather(city: str, unit: str) -> str:
    """The weather in a city; unit is celsius or fahrenheit."""
    return "sunny"


@wrap_model_call
def first_a_tool(request, handler):
    """Demand a call of the first turn, and an answer of the second."""
    called = any(message.type == "tool" for message in request.messages)
    return handler(request.override(tool_choice="none" if called else "required"))


def chat(url, model, **settings):
    settings = {"temperature": 0, "max_tokens": 96, "max_retries": 0, "timeout": 300} | settings
    return ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, **settings)


@check
def invoke(url, model, tokenizer):
    reply = chat(url, model).invoke(QUESTION)
    assert "Paris" in reply.content and reply.usage_metadata["output_tokens"]
    return reply.content


@check
def stream(url, model, tokenizer):
    parts = [part.content for part in chat(url, model).stream(QUESTION)]
    assert "Paris" in "".join(parts) and len(parts) > 2
    return f"{len(parts)} parts"


@check
def bind_tools(url, model, tokenizer):
    reply = chat(url, model).bind_tools([get_weather], tool_choice="required").invoke(WEATHER[0]["content"])
    (first, *_) = reply.tool_calls
    assert first["name"] == "get_weather" and first["args"].keys() == {"city", "unit"}
    return str(first["args"])


@check
def bind_tools_strict(url, model, tokenizer):
    from checks import WEATHER_TOOL

    bound = chat(url, model).bind_tools([WEATHER_TOOL], tool_choice="get_weather", strict=True)
    (first, *_) = bound.invoke(WEATHER[0]["content"]).tool_calls
    return weather_arguments(first["args"])


@check
def with_structured_output(url, model, tokenizer):
    said = []
    for method in ("json_schema", "function_calling"):
        made = chat(url, model).with_structured_output(City, method=method).invoke("Describe Paris.")
        assert isinstance(made, City), made
        said.append(f"{method}: {made!r}")
    return "; ".join(said)


@check
def agent(url, model, tokenizer):
    made = create_agent(chat(url, model), [get_weather], middleware=[first_a_tool])
    messages = made.invoke({"messages": WEATHER})["messages"]
    kinds = [each.type for each in messages]
    assert kinds == ["human", "ai", *(["tool"] * (len(kinds) - 3)), "ai"] and messages[2].content == "sunny", messages
    return f"{messages[1].tool_calls[0]['args']}, then {messages[-1].content[:60]!r}"


@check
def anthropic(url, model, tokenizer):
    """Over /v1/messages: a stream, a forced call, its result, and a count."""
    settings = {"temperature": 0, "max_tokens": 96, "max_retries": 0, "timeout": 300}
    chat = ChatAnthropic(base_url=url, api_key="unused", model=model, **settings)
    assert "Paris" in "".join(part.text for part in chat.stream(QUESTION))
    called = chat.bind_tools([get_weather], tool_choice="any").invoke(WEATHER[0]["content"])
    (first, *_) = called.tool_calls
    assert first["name"] == "get_weather" and first["args"].keys() == {"city", "unit"}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in called.tool_calls]
    assert chat.bind_tools([get_weather]).invoke([*WEATHER, called, *results]).usage_metadata["input_tokens"]
    return f"{first['args']}, {chat.get_num_tokens_from_messages([called])} tokens"


main()
