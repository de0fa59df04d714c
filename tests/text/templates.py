"""Chat templates with the rules of public ones, in a few lines each."""

QWEN25 = """
{%- if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant'
    and not message.tool_calls) %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls %}{{ '<tool_call>' + call.function.name + (call.function.arguments | tojson) }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + message.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
"""

# Earlier turns lose their reasoning.
QWEN3 = """
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or () %}{{ '<tool_call>' + call.function.name }}
{{- call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + message.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# Arguments must be mappings.
QWEN3_CODER = QWEN3.replace(
    "{{- call.function.arguments | tojson }}",
    "{%- for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>' + value | string }}"
    "{% endfor %}",
)

# Any role has a header; text beside calls is dropped.
LLAMA3 = """
{{- '<|begin_of_text|>' }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' + message.tool_calls[0].function.name }}
{{- message.tool_calls[0].function.arguments | tojson }}
{%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}
"""

# A system message comes first or not at all, and turns alternate.
MISTRAL = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}{{ '<s>' }}
{%- set turns = namespace(n=0) %}
{%- for message in rest %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (turns.n % 2 == 0) %}{{ raise_exception('conversation roles must alternate') }}
{%- endif %}{% set turns.n = turns.n + 1 %}{% endif %}
{%- if message.role == 'user' %}
{{- '[INST]' + (system + '\\n\\n' if system and loop.last else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS]' + (message.tool_calls | tojson) }}
{%- elif message.role == 'assistant' %}{{ message.content + '</s>' }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}
"""

GEMMA = """
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{{ '<bos>' }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
"""

# All system messages are written first; calls and other roles are dropped.
DEEPSEEK = """
{%- set ns = namespace(system='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}
{%- endif %}{% endfor %}{{ '<｜begin▁of▁sentence｜>' + ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' %}
{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}
"""

# Later system messages are dropped.
FIRST_SYSTEM = """
{%- for message in messages %}{% if message.role == 'system' and loop.first %}{{ message.content }}
{%- elif message.role in ('user', 'assistant') %}{{ message.role + ':' + message.content }}{% endif %}{% endfor %}
"""
