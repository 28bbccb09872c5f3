"""The program that runs all benchmarks: commands with their places filled in, and what is left out."""

import re
import sys

import pytest

import run_all
from evidence.sections import SECTIONS

GIVEN = {
    name: f"/{name.lower()}" for name in ("DATA", "MODEL", "TOWER", "TEXT", "QUESTIONS", "CHECKOUT", "MOE", "LLMC")
}
BY_NAME = {section.name: section for section in SECTIONS}


def test_every_command_can_be_filled_in(tmp_path):
    given = GIVEN | {"VLLM": "/vllm", "EXPORTS": "/a /b", "MOES": "/c"}
    for section in SECTIONS:
        commands = run_all.commands_of(section, given, tmp_path)
        assert isinstance(commands, list)
        for words in commands:
            assert words[:2] == ["python", section.program]
            assert not [word for word in words if re.fullmatch(r"[A-Z]{3,}", word)]
    (parity,) = run_all.commands_of(BY_NAME["vllm_parity"], given, tmp_path)
    assert parity[2:] == ["/data", "/a", "/b", "--vllm", "/vllm"]
    (whole,) = run_all.commands_of(BY_NAME["whole_models"], given, tmp_path)
    assert "SmolLM2-MoE=/moe" in whole and str(tmp_path / "whole_models") in whole


def test_a_place_that_is_not_given_is_named(tmp_path):
    assert run_all.commands_of(BY_NAME["vllm_parity"], GIVEN, tmp_path) == "give EXPORTS=... and VLLM=..."


@pytest.mark.parametrize(("code", "exits"), [("print('measured')", None), ("raise SystemExit(3)", 1)])
def test_a_section_that_fails_is_said_and_the_pages_are_written(monkeypatch, capsys, tmp_path, code, exits):
    program, written = tmp_path / "program.py", []
    program.write_text(code)
    monkeypatch.setattr(run_all, "commands_of", lambda *_: [["python", str(program)]])
    monkeypatch.setattr(sys, "argv", ["run_all.py", str(tmp_path), "--only", "convert", "demo"])
    monkeypatch.setattr(run_all, "write_pages", lambda: written.append(True))
    if exits:
        with pytest.raises(SystemExit, match="failed: demo, convert"):
            run_all.main()
        assert "failed with 3" in capsys.readouterr().out
    else:
        run_all.main()
        assert (tmp_path / "demo.log").read_text() == "measured\n"
    assert written == [True]


def test_a_place_that_there_is_not_is_an_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run_all.py", str(tmp_path), "MODLE=x"])
    with pytest.raises(SystemExit):
        run_all.main()
    assert "MODLE is no place" in capsys.readouterr().err
