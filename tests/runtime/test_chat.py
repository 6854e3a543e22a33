"""Chat templates: the formats they produce, and what a hostile one cannot do."""

from __future__ import annotations

import time

import pytest

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.runtime import chat
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.tokenizer import load_tokenizer

pytest_plugins = ("runtime_fixtures",)

HI = [{"role": "user", "content": "Hi"}]
TALK = [{"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]


def test_blocks_are_trimmed_and_helpers_exist():
    text = "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}\n"
    text += "{{ bos_token }}{{ {'a': 'é'} | tojson }}"
    assert chat.render(text, HI, bos_token="<s>") == '[Hi]\n<s>{"a": "é"}'
    assert len(chat.render("{{ strftime_now('%Y') }}", HI)) == 4
    assert (
        chat.render(
            "{{ tools | length }}{% for i in range(3) %}{{ loop.index }}{% if loop.last %}{% break %}{% endif %}{% endfor %}", HI, tools=[1]
        )
        == "1123"
    )


def test_the_template_may_refuse_the_conversation():
    with pytest.raises(RuntimeRefusal, match="only users may speak"):
        chat.render("{{ raise_exception('only users may speak') }}", HI)
    with pytest.raises(RuntimeRefusal, match="message 0 needs a role"):
        chat.render("x", [{"content": "Hi"}])


def test_gemma_files_without_a_template_use_the_built_in_one():
    metadata = {"general.architecture": "gemma3"}
    assert chat.is_built_in(metadata)
    text = chat.render(chat.template_of(metadata), TALK, bos_token="<bos>")
    assert text == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(RuntimeRefusal, match="take turns"):
        chat.render(chat.template_of(metadata), HI + HI)


def test_files_without_a_template_name_the_option():
    with pytest.raises(RuntimeRefusal, match="--chat-template"):
        chat.template_of({"general.architecture": "llama"})
    own = {"general.architecture": "gemma3", chat.TEMPLATE_KEY: "mine", chat.TEMPLATE_KEY + ".tool_use": "tools"}
    assert chat.template_of(own) == "mine" and chat.template_of(own, "tool_use") == "tools" and not chat.is_built_in(own)
    with pytest.raises(RuntimeRefusal, match="'rag'"):
        chat.template_of(own, "rag")


@pytest.mark.models
def test_a_real_template_and_its_tokens(real_model):
    with GGUFFile.open(real_model("SmolLM2-135M-Instruct.Q4_1.gguf")) as file:
        text = chat.render(chat.template_of(file.metadata), HI)
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        ids = load_tokenizer(file.metadata).encode(text)
        assert ids.count(1) == 3 and ids.count(2) == 2


ESCAPES = [  # CVE-2024-34359, CVE-2026-5760
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['datetime'] }}",
    "{{ range.__self__.__class__.__init__.__globals__ }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_nothing_leaves_the_sandbox(template):
    with pytest.raises(RuntimeRefusal, match="chat template"):
        chat.render(template, HI)


def test_hidden_attributes_stay_hidden():
    assert chat.render("{{ 'x' | attr('__class__') }}|{{ messages | map(attribute='__class__') | join }}", HI) == "|"


GROW = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(300) %}{% for j in 'a' * 8000000 %}{% endfor %}{% endfor %}",
    GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    GROW + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    GROW + "{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    GROW + "{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
    GROW + "{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}",
    GROW + "{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + GROW + "{% set ns.x = m(ns.x) %}{% endfor %}",
    "{{ 'a' * 99999999999 }}",
    "{{ [0] * 99999999999 }}",
    "{{ 'a'.center(9999999999) }}",
    "{{ 'a'.zfill(9999999999) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 'x' | center(9999999999) }}",
    "{{ range(10 ** 12) | list }}",
    "{{ [1] | batch(10 ** 9, 0) | list }}",
    "{{ [1] | slice(10 ** 9) | list }}",
    "{% set l = [0] * 8000000 %}{{ ([l] * 400) | sum(start=[]) }}",
    "x" * (chat.MAX_TEMPLATE + 1),
]


@pytest.mark.parametrize("template", BOMBS, ids=range(len(BOMBS)))
def test_nothing_grows_without_bound(template):
    began = time.perf_counter()
    with pytest.raises(RuntimeRefusal, match="chat template"):
        chat.render(template, HI)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ 1 / 0 }}", "{{ unknown.field }}", "{{ messages[9].content.x }}", "{{ 'a' | nofilter }}", "{% raise %}"]
)
def test_faults_of_a_template_are_one_error(template):
    with pytest.raises(RuntimeRefusal, match="--chat-template"):
        chat.render(template, HI)


def test_session_writes_exactly_one_bos(session):
    s = session()
    ids = s.chat_tokens(HI, template="{{ bos_token }}{{ messages[0].content }}")
    assert ids[0] == s.tokenizer.bos and ids.count(s.tokenizer.bos) == 1
    assert s.chat_tokens(HI, template="{{ messages[0].content }}") == ids
