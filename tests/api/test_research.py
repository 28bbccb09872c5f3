"""A script of public names: what a researcher asks of a model first."""

from tests.api.research import answers


def test_a_researcher_finds_what_is_asked_for(data_dir, tmp_path):
    found = answers(str(data_dir / "weights" / "stories260K" / "hf"), tmp_path)
    assert found["layers"] > 1 and found["its choices"] > 0 and found["its choices when it is off"] == 0
    assert found["moved by a swap"] > 0.1 and found["last loss"] < found["first loss"]
    assert found["experts moved"] == 0 and found["restored"] == 1
    assert found["of a bank"] < found["parameters"]
