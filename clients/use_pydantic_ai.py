"""Pydantic AI: an agent with a tool, and a typed answer, over chats and over `/v1/responses`."""

from checks import WEATHER, check, main
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0, "max_tokens": 96}


class City(BaseModel):
    name: str
    country: str


def made(kind, url, model):
    return kind(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="unused"))


def add(kind):
    def tool_and_typed_answer(url, model, tokenizer):
        """The typed answer is a tool's call, which the client demands; its other tool may be called before."""
        agent = Agent(made(kind, url, model), output_type=City, model_settings=SETTINGS, retries=3)

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """The weather in a city."""
            return f"sunny in {city}"

        result = agent.run_sync(WEATHER[0]["content"])
        assert isinstance(result.output, City), result
        return repr(result.output)

    def typed_answer_by_schema(url, model, tokenizer):
        agent = Agent(made(kind, url, model), output_type=NativeOutput(City), model_settings=SETTINGS)
        result = agent.run_sync("Describe Paris.")
        assert isinstance(result.output, City), result
        return repr(result.output)

    for function in (tool_and_typed_answer, typed_answer_by_schema):
        function.__name__ += f" {kind.__name__}"
        check(function)


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    add(kind)
main()
