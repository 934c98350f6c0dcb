"""docs/data.md as it stands there: from a Hugging Face folder to one, for a tiny
Llama."""

from tests.docs.test_quick_start import blocks, copy, run  # noqa: F401  (a fixture)


def test_there_and_back(copy):  # noqa: F811
    make, convert, plan, train, export, finetune = blocks("data.md")
    run(make, copy)
    run(convert, copy)
    assert "Best: " in run(plan, copy)
    assert run(train, copy).count("lm loss:") == 5
    assert "2BW keeps two versions of" in run(export, copy)
    assert "adapter_model.safetensors" in run(finetune, copy)
