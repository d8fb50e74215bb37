"""Chat templates: the text that transformers renders, where they come from, and faults by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from firstlight.errors import FirstlightError
from firstlight.text.template import ChatTemplate
from firstlight.text.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  Gr\u00fc\u00dfe \U0001f600 "},
    {"role": "assistant", "content": "Hello.", "tool_calls": None},
    {"role": "user", "content": "And now?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look <up> \u00fc", "parameters": {"b": 1, "a": []}},
    }
]
TEMPLATES = {
    "whitespace": """
{% for message in messages %}
    {% if message['role'] == 'user' %}
    [U] {{ message['content'] | trim }}
    {% else %}
  [{{ message['role'] }}] {{ message['content'] }}
    {%- endif %}

{% endfor %}
{% if add_generation_prompt %}[A]{% endif %}
""",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{{ unk_token }}",
    "loop control": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "tools": "{% if tools is not none %}{% for tool in tools %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}"
    "{% endfor %}{% endif %}{{ messages[0] | tojson }}"
    "{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}"
    "{% endgeneration %}\n{% endfor %}{{ x }}",
    "namespace": "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.role %}{% endfor %}"
    "{{ ns.last }}",
    "date": "{{ strftime_now('%Y') }}{{ dict(a=1).a }}",
    "null field": "{% for m in messages %}{{ 'calls' if m.tool_calls is defined else '-' }}{% endfor %}",
    "variables": "{{ thinking if thinking is defined else 'unset' }}{{ documents is none }}",
}


def with_template(folder: Path, template: Any) -> Path:
    """Write "chat_template" into the folder's tokenizer_config.json, or remove it if None."""
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "chat_template": template}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def theirs(folder: Path, **options: Any) -> str:
    """Return what transformers renders for CHAT."""
    text: str = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(CHAT, tokenize=False, **options)
    return text


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_template_renders_as_in_transformers(source: str, demo_copy: Path) -> None:
    folder = with_template(demo_copy, source)
    template = ChatTemplate.load(folder)
    for prompt in (True, False):
        assert template.render(CHAT, add_generation_prompt=prompt) == theirs(folder, add_generation_prompt=prompt)
    assert template.render(CHAT, tools=TOOLS, add_generation_prompt=False) == theirs(folder, tools=TOOLS)
    assert template.render(CHAT, variables={"thinking": "on"}) == theirs(
        folder, thinking="on", add_generation_prompt=True
    )


def test_the_demo_chat_is_one_begin_and_a_turn_per_message(demo_folder: Path) -> None:
    text = ChatTemplate.load(demo_folder).render(CHAT)
    assert text == theirs(demo_folder, add_generation_prompt=True)
    assert text.startswith("<|begin|><|system|>\nBe <brief> & kind.\n<|user|>\n")
    assert text.endswith("Hello.\n<|end|><|user|>\nAnd now?\n<|assistant|>\n")
    tokenizer = Tokenizer.load(demo_folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.token_id("<|begin|>")) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_jinja_file_wins_over_the_config(demo_copy: Path) -> None:
    with_template(demo_copy, "config")
    assert ChatTemplate.load(demo_copy).render(CHAT) == "config"
    (demo_copy / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(demo_copy).render(CHAT) == "file" == theirs(demo_copy)


def test_a_file_given_by_hand_wins_over_the_folder(demo_copy: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}mine")
    assert ChatTemplate.load(demo_copy, file=file).render(CHAT) == "<|begin|>mine"
    with pytest.raises(FirstlightError, match="cannot read the chat template") as error:
        ChatTemplate.load(demo_copy, file=tmp_path / "absent.jinja")
    assert error.value.where.endswith("absent.jinja")


def test_of_named_templates_the_one_for_tools_is_taken_with_tools(demo_copy: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    template = ChatTemplate.load(with_template(demo_copy, named))
    assert template.render(CHAT) == "plain" == theirs(demo_copy)
    assert template.render(CHAT, tools=TOOLS) == "with tools" == theirs(demo_copy, tools=TOOLS)
    only = ChatTemplate.load(with_template(demo_copy, named[1:]))
    with pytest.raises(FirstlightError, match="no default chat template") as error:
        only.render(CHAT)
    assert "tool_use" in error.value.why


def test_a_model_without_a_template_gets_no_other_and_the_fix_is_named(demo_copy: Path) -> None:
    with pytest.raises(FirstlightError, match="no chat template") as error:
        ChatTemplate.load(with_template(demo_copy, None))
    assert "--chat-template FILE" in error.value.fix
    assert Tokenizer.load(demo_copy).encode("a plain completion")


@pytest.mark.parametrize("source", ["{% for m in messages %}", "a\n{{ messages | nofilter }}", "{{ 'open }}"])
def test_broken_jinja_is_refused_when_loaded_with_its_line(source: str, demo_copy: Path) -> None:
    with pytest.raises(FirstlightError, match="not valid Jinja") as error:
        ChatTemplate.load(with_template(demo_copy, source))
    assert f"line {source.count(chr(10)) + 1} of the template" in error.value.where
    assert error.value.why
    assert "--chat-template FILE" in error.value.fix


@pytest.mark.parametrize("value", [3, {"name": "default"}, [{"name": "default"}], ["text"]])
def test_a_chat_template_of_another_form_is_refused(value: object, demo_copy: Path) -> None:
    with pytest.raises(FirstlightError, match="text or a list"):
        ChatTemplate.load(with_template(demo_copy, value))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.name }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_on_the_messages_says_why(source: str, why: str, demo_copy: Path) -> None:
    template = ChatTemplate.load(with_template(demo_copy, source))
    with pytest.raises(FirstlightError, match="refused the messages") as error:
        template.render(CHAT)
    assert why in error.value.why


def test_the_demo_refuses_an_unknown_role(demo_folder: Path) -> None:
    with pytest.raises(FirstlightError) as error:
        ChatTemplate.load(demo_folder).render([{"role": "tool", "content": "x"}])
    assert "unknown role tool" in error.value.why
