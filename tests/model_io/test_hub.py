"""Names of the Hugging Face Hub in the place of paths, against a small Hub of our own."""

import hashlib
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import urllib.parse

import pytest
import torch

from moe_jax.api.open_source import open_source, read_config
from moe_jax.conversion import convert
from moe_jax.core.errors import InputError
from moe_jax.model_io.lineage import hub_origin, local_model
from moe_jax.model_io.model_names import is_hub_name
from tests.support.environment import ROOT
from tests.support.forked import OF_MODELS, start
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class Hub(http.server.ThreadingHTTPServer):
    """Serves models and notes which files were asked for.

    Attributes:
      models: name -> revision -> file -> content; a string instead is the code of an error.
      fetched: `name/file` of every file that was sent.
    """

    def __init__(self, models):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.models, self.fetched = models, []


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self, body: bool = True) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path).removeprefix("/")
        api = path.startswith("api/models/")
        words = path.removeprefix("api/models/").split("/")
        name, rest = "/".join(words[:2]), words[2:]
        model = self.server.models.get(name, "RepoNotFound")
        if isinstance(model, str):
            return self._send(403 if model == "GatedRepo" else 404, b"{}", {"X-Error-Code": model})
        asked = rest[1] if len(rest) > 1 else "main"
        revision = next((one for one, commit in COMMITS.items() if asked in (one, commit)), None)
        if revision not in model:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files, commit = model[revision], COMMITS[revision]
        if api and rest[:1] == ["tree"]:
            listed = [{"type": "file", "path": file, "size": len(content), "oid": _etag(content)}
                      for file, content in files.items()]  # fmt: skip
            return self._send(200, json.dumps(listed).encode(), body=body)
        if api:
            about = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            return self._send(200, json.dumps(about).encode(), body=body)
        file = "/".join(rest[2:])
        if file not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        if body:
            self.server.fetched.append(f"{name}/{file}")
        self._send(200, files[file], {"X-Repo-Commit": commit, "ETag": f'"{_etag(files[file])}"'}, body=body)

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def _send(self, status: int, content: bytes, headers=None, *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *words) -> None:
        pass


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    config, tensors = CONFIGS["llama"], random_tensors(CONFIGS["llama"])
    write_checkpoint(folder / "safe", config, tensors, shards=2)
    safe = {file.name: file.read_bytes() for file in (folder / "safe").iterdir()}
    extra = {"modeling_x.py": b"raise SystemExit", "pytorch_model.bin": b"x", "original/model.safetensors": b"x",
             "consolidated.safetensors": b"x", "README.md": b"x", "generation_config.json": b"{}",
             "additional_chat_templates/rag.jinja": b"not x"}  # fmt: skip
    (folder / "torch").mkdir()
    state = {name: torch.from_numpy(values) for name, values in tensors.items()}
    torch.save(state, folder / "torch" / "pytorch_model.bin")
    by_torch = {"config.json": json.dumps(config).encode(), "modeling_x.py": b"raise SystemExit",
             "pytorch_model.bin": (folder / "torch" / "pytorch_model.bin").read_bytes()}  # fmt: skip
    served = Hub({
        "org/tiny": {"main": safe | extra, "v1": safe},
        "org/torch": {"main": by_torch},
        "org/gguf": {"main": {"config.json": safe["config.json"], "m.gguf": b"x"}},
        "org/gated": "GatedRepo",
    })  # fmt: skip
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def run(folder: pathlib.Path, endpoint: str, commands: list[list[str]], **environment: str) -> list[dict]:
    """Runs commands in a folder with a cache below it."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}  # fmt: skip
    arguments = ["-m", "tests.support.hub_commands", json.dumps(commands)]
    code, printed, said = _ended(arguments, folder, settings | environment)
    assert code == 0, said
    return [json.loads(line) for line in printed.splitlines()]


def _ended(arguments: list[str], folder: pathlib.Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a process of its own."""
    how = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    # The library of the Hub reads its variables when it is imported: it is none of what is imported beforehand.
    with start([sys.executable, *arguments], imports=("moe_jax.commands.cli", *OF_MODELS), env=env, **how) as process:
        printed, said = process.communicate(timeout=300)
    return process.returncode, printed, said


def test_models_are_fetched_without_code_and_kept(hub, tmp_path):
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    plan, safe, pickled, tagged, dry, gated, absent, revision, gguf = run(tmp_path, endpoint, [
        ["plan", "org/tiny", "--json"],
        ["convert", "org/tiny", "safe"],
        ["convert", "org/torch", "torch"],
        ["export", "org/tiny@v1", "exported"],
        ["convert", "org/torch", "dry", "--dry-run"],
        ["plan", "org/gated"],
        ["convert", "org/absent", "x"],
        ["convert", "org/tiny@v2", "x"],
        ["convert", "org/gguf", "x"],
    ])  # fmt: skip
    assert [one["code"] for one in (plan, safe, pickled, tagged, dry)] == [0] * 5
    for one, why in (
        (gated, "gives it only to those who were granted access"),
        (absent, "has no such model, or it is private"),
        (revision, "has no such revision"),
        (gguf, "neither safetensors nor PyTorch files"),
    ):
        assert one["code"] == 2 and why in one["said"] and len(one["said"].splitlines()) == 1, one
    shards = [f"model-{i}-of-00002.safetensors" for i in ("00001", "00002")]
    template = "additional_chat_templates/rag.jinja"
    wanted = {template, "README.md", "config.json", "generation_config.json", "model.safetensors.index.json", *shards}
    assert {name.removeprefix("org/tiny/") for name in hub.fetched if name.startswith("org/tiny/")} == wanted
    assert {name for name in hub.fetched if "torch" in name} == {"org/torch/config.json", "org/torch/pytorch_model.bin"}
    for name, model, commit in (("safe", "org/tiny", "a"), ("torch", "org/torch", "a"), ("exported", "org/tiny", "b")):
        (entry,) = json.loads((tmp_path / name / "lineage.json").read_text())
        assert entry["sources"][0]["hub"] == f"{model}@{commit * 40}"
    same = [open_source(tmp_path / name).read("embed/embedding").tobytes() for name in ("safe", "torch", "exported")]
    assert len(set(same)) == 1

    before = list(hub.fetched)
    again, absent = run(tmp_path, endpoint, [["convert", "org/tiny", "again"], ["plan", "org/absent"]],
                        HF_HUB_OFFLINE="1")  # fmt: skip
    assert again["code"] == 0 and hub.fetched == before
    assert absent["code"] == 2 and "cache does" in absent["said"] and len(absent["said"].splitlines()) == 1


_UNREACHED = """
import sys
from moe_jax.core.errors import InputError
from moe_jax.model_io.lineage import local_model
for weights in (True, False):
    try:
        local_model("org/absent", weights=weights)
    except InputError as error:
        print("InputError:", error, file=sys.stderr)
"""


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path):
    """With and without weights."""
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": "none"}
    _, _, said = _ended(["-c", _UNREACHED], tmp_path, environment)
    expected = f"there is no path org/absent in {tmp_path}; such a name is looked for on the Hugging Face Hub too, but "
    first, second = (line for line in said.splitlines() if line.startswith("InputError: "))
    assert first.startswith(f"InputError: {expected}the Hugging Face Hub cannot be reached: ")
    assert second.startswith(f"InputError: {expected}the Hugging Face Hub cannot be reached: ")
    assert "Retrying" not in said


def test_what_is_here_is_a_path_and_the_rest_a_name_if_it_can_be_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mistralai/Mixtral-8x7B-v0.1", "org/name@main", "org/name@refs/pr/1", "a/b"):
        assert is_hub_name(name)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    for path in (
        "runs/one",
        "runs/two",
        "model",
        "/a/b",
        "../a/b",
        "./a",
        "a/b/c",
        "a/b/",
        "a b/c",
        "a/-b",
        "a/b@",
        "~/a",
    ):
        assert not is_hub_name(path) and local_model(path) == pathlib.Path(path)
    why = f"; it is not looked for on the Hugging Face Hub, because there is a runs in {tmp_path}"
    for use, said in ((open_source, "no model at runs/two"), (read_config, "no config at runs/two")):
        with pytest.raises(FileNotFoundError) as error:
            use("runs/two")
        assert str(error.value) == said + why
    with pytest.raises(FileNotFoundError) as error:
        convert("runs/two", "out")
    assert str(error.value).startswith("there is nothing at runs/two; ") and str(error.value).endswith(why)
    for path, said in (("runs", "no config at runs/config.json"), ("model", "no config at model")):
        with pytest.raises(FileNotFoundError) as error:
            read_config(path)
        assert str(error.value) == said
    said = f"there is no path org/name in {tmp_path}; such a name is looked for on the Hugging Face Hub too, but the "
    with pytest.raises(InputError, match=re.escape(said + "Hugging Face Hub")):
        open_source("org/name")


def test_without_the_package_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'moe-jax\[hub\]', or give"):
        local_model("org/name")


def test_commits_are_those_of_the_cache():
    snapshot = f"/home/x/.cache/huggingface/hub/models--org--na-me.1/snapshots/{'0' * 40}"
    assert hub_origin(snapshot) == f"org/na-me.1@{'0' * 40}" and hub_origin("/models/org/name") is None


def test_a_path_with_a_mistake_is_not_only_taken_for_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-models").mkdir()
    with pytest.raises(InputError, match="did you mean 'my-models'"):
        local_model("my-model/dense", weights=False)
