"""One torch thread a test process: two processes share two cores. A tiny cache, a local S3."""

import os
import uuid

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Root of a tiny cache that tests read and leave as it is."""
    from tiny_cache import tiny_cache

    root = tmp_path_factory.mktemp("tiny") / "cache"
    tiny_cache(root)
    return root


@pytest.fixture
def s3(monkeypatch):
    """URL of an empty place on a local S3 server, with credentials from the environment."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}/some/cache"
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()
