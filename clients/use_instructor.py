"""instructor in its default mode, which makes a model call a tool."""

import instructor
import openai
from checks import check, main
from pydantic import BaseModel


class City(BaseModel):
    name: str
    country: str


@check
def default_mode(url, model, tokenizer):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=300))
    ask = [{"role": "user", "content": "Describe Paris."}]
    made = client.chat.completions.create(
        model=model, messages=ask, response_model=City, temperature=0, max_tokens=96, max_retries=0
    )
    assert isinstance(made, City)
    return repr(made)


main()
