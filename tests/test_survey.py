"""A sample of the survey of architectures (tests/survey.py), so that it stays able to tell."""

import pytest

from tests import survey


@pytest.mark.parametrize(
    "type_name, kind, why",
    [
        ("opt", "exact", ""),  # a decoder inside the decoder
        ("roberta", "exact", ""),  # whose own positions begin elsewhere
        ("gpt_oss", "exact", ""),  # attention sinks, mixture of experts
        ("lfm2", "exact", ""),  # recurrent layers
        ("gemma4_text", "exact", ""),  # layers that read another's slots, KV heads of two numbers and widths
        ("mimo_v2_flash", "exact", ""),  # layers with other numbers of KV heads, values narrower than keys, sinks
        ("stablelm", "exact", ""),  # which drops arguments that it does not know
        ("mamba", "refused", "has no num_attention_heads"),
    ],
)
def test_a_sample(type_name, kind, why):
    found = survey.examine(type_name)
    assert found.kind == kind and why in found.why, found


def test_it_can_find_what_is_wrong(monkeypatch):
    monkeypatch.setattr(survey, "token_logprobs", lambda model, tokens, trace: -1e-3 + 0.0 * tokens)
    assert survey.examine("opt").kind == "wrong"

    def crash(*_):
        raise ValueError("no")

    monkeypatch.setattr(survey, "token_logprobs", crash)
    found = survey.examine("opt")
    assert found.kind == "crash" and "log-probs (dense): ValueError: no" in found.why


def test_the_page_counts_every_kind():
    findings = [survey.Finding("a", "A", "exact"), survey.Finding("b", "B", "refused", "x | y")]
    text = survey.page(findings)
    assert "| 1 | 1 | 0 | 0 | 0 | 0 | 2 |" in text and "| `b` | refused | x / y |" in text
