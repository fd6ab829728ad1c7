"""Which variables a server is given."""

from __future__ import annotations

import pytest

from trtpipe.pipeline.serving.environment import without_secrets


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRTPIPE_API_KEYS", "a,b"),
        ("HF_TOKEN", "hf_x"),
        ("HUGGING_FACE_HUB_TOKEN", "hf_x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_PROFILE", "work"),
        ("AZURE_CLIENT_ID", "x"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/x.json"),
        ("OPENAI_API_KEY", "sk-x"),
        ("WANDB_APIKEY", "x"),
        ("NGC_API_KEY", "x"),
        ("github_token", "x"),
        ("MYSQL_PWD", "x"),
        ("PGPASSWORD_PASSWORD", "x"),
        ("SSH_AUTH_SOCK", "/x"),
        ("TRTPIPE_RENDEZVOUS_SECRET", "x"),
        ("PIP_INDEX_URL", "https://somebody:secret@index.invalid/simple"),
        ("HTTPS_PROXY", "http://a:b@proxy:3128"),
        ("DATABASE_URL", "postgresql://:secret@db/x"),
    ],
)
def test_a_secret_is_left_out(name: str, value: str) -> None:
    assert without_secrets({name: value, "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PATH", "/bin"),
        ("HOME", "/h"),
        ("PWD", "/h"),
        ("OLDPWD", "/"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("NCCL_DEBUG", "INFO"),
        ("LD_LIBRARY_PATH", "/lib"),
        ("XDG_RUNTIME_DIR", "/run"),
        ("LC_ALL", "C.UTF-8"),
        ("KEYBOARD", "de"),
        ("HF_HOME", "/hf"),
        ("HF_HUB_OFFLINE", "1"),
        ("HTTP_PROXY", "http://proxy:3128"),
        ("DOCKER_HOST", "ssh://somebody@host"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ],
)
def test_what_is_no_secret_is_kept(name: str, value: str) -> None:
    assert without_secrets({name: value}) == {name: value}
