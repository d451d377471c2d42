"""Generation against a real HTTP server: concurrency, retries, endpoints, resume, errors."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shared.config import compose
from shared.errors import ConfigError
from shared.log import read_json_lines
from stage1_extract.config import GenerateConfig, ServerConfig
from stage1_extract.generate import generate
from stage1_extract.remote import AnswerError, Server, answer_chats


class Handler(BaseHTTPRequestHandler):
    """Answers with the last question in upper case; some questions make it fail."""

    def do_GET(self):
        self.reply(200, {"data": [{"id": "served"}]})

    def do_POST(self):
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with state["lock"]:
            state["seen"][question] += 1
            state["open"] += 1
            state["most"] = max(state["most"], state["open"])
            state["keys"].add(self.headers.get("Authorization"))
            count = state["seen"][question]
        assert body["temperature"] == 0
        assert body["model"] == "served"
        state["gate"].wait(0.02)
        with state["lock"]:
            state["open"] -= 1
        if question == "busy" and count < 3:
            return self.reply(429, {"error": "slow down"})
        if question == "drop" and count == 1:
            return self.close()
        if question == "cut" and count == 1:
            self.send_response(200)
            self.send_header("Content-Length", "999")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            return self.close()
        if question == "refused" and not state["healed"]:
            return self.reply(400, {"error": "too long"})
        if question == "broken" and not state["healed"]:
            return self.reply(500, {"error": "oops"})
        answer = {"role": "assistant", "content": question.upper()}
        reason = "length" if question == "long" else "stop"
        choice = {"message": answer, "finish_reason": reason}
        return self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 7}})

    def close(self):
        self.close_connection = True
        self.connection.close()

    def reply(self, code, document):
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass

    def finish(self):
        try:
            super().finish()
        except (OSError, ValueError):
            return  # a connection that the test has closed


@contextmanager
def serving():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.state = {
        "seen": Counter(), "open": 0, "most": 0, "keys": set(), "healed": False,
        "lock": threading.Lock(), "gate": threading.Event(),
    }  # fmt: skip
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.state, f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr("stage1_extract.remote._LONGEST_WAIT_S", 0.01)


def config(tmp_path, turns, *endpoints, **server):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"turns": turn}) + "\n" for turn in turns))
    overrides = [f"server.{key}={value}" for key, value in server.items()]
    return compose(
        "generate",
        GenerateConfig,
        [
            f"data.paths=[{data}]",
            f"output={tmp_path / 'out.jsonl'}",
            f"server.endpoints=[{','.join(endpoints)}]",
            *overrides,
        ],
    )


def test_chats_are_answered_concurrently_by_all_endpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    turns = [[f"q{i}", f"again {i}"] for i in range(12)]
    turns += [["busy"], ["drop"], ["cut"], ["long"]]
    with serving() as (one, first), serving() as (two, second):
        assert generate(config(tmp_path, turns, first, second, concurrency=6)) == 0
        assert 1 < one["most"] <= 6
        assert sum(one["seen"].values()) > 5
        assert sum(two["seen"].values()) > 5
        assert one["keys"] == {"Bearer secret"}
        assert (one["seen"]["busy"] + two["seen"]["busy"]) == 3
        # Nothing is left to do: no request is sent.
        before = sum(one["seen"].values())
        assert generate(config(tmp_path, turns, first, second)) == 0
        assert sum(one["seen"].values()) == before
    shown = capsys.readouterr().out
    assert "16 chats generated, 0 kept, 0 rejected, 196 tokens" in shown
    lines = read_json_lines(tmp_path / "out.jsonl")
    assert [line["messages"][0]["content"] for line in lines] == [turn[0] for turn in turns]
    assert [m["content"] for m in lines[3]["messages"]] == ["q3", "Q3", "again 3", "AGAIN 3"]
    assert lines[-1]["messages"][1]["finish_reason"] == "length"
    assert {line["target"] for line in lines} == {"served"}  # not the configured local target
    # With all answers there, nobody has to serve.
    assert generate(config(tmp_path, turns, "http://127.0.0.1:9/v1", retries=0)) == 0


def test_a_stop_finishes_chats_in_hand_with_all_their_turns():
    stop, asked, done = threading.Event(), [], []

    class Chat:
        def __init__(self):
            self.messages = []

        def add(self, message):
            self.messages.append(message)
            return len(self.messages) < 3

    class Fake:
        cfg = ServerConfig(endpoints=["http://x"], concurrency=1)

        def answer(self, endpoint, messages):
            asked.append(endpoint)
            stop.set()
            return {"tokens": 1}

    answer_chats(Fake(), [Chat(), Chat()], stop, done.append, None, lambda tokens: None)
    assert len(asked) == 3
    assert len(done) == 1


def test_failures_go_to_their_own_file_and_are_tried_again(tmp_path, capsys):
    turns = [["ok"], ["refused"], ["broken"], ["fine"]]
    with serving() as (state, endpoint):
        assert generate(config(tmp_path, turns, endpoint, retries=2)) == 3
        errors = read_json_lines(tmp_path / "out.jsonl.errors.jsonl")
        reasons = {error["source"].rpartition(":")[2]: error["reason"] for error in errors}
        assert "HTTP 400" in reasons["2"]
        assert "HTTP 500" in reasons["3"]
        assert (state["seen"]["refused"], state["seen"]["broken"]) == (1, 3)
        assert len(read_json_lines(tmp_path / "out.jsonl")) == 2
        state["healed"] = True
        assert generate(config(tmp_path, turns, endpoint)) == 0
        assert state["seen"]["ok"] == 1
    assert len(read_json_lines(tmp_path / "out.jsonl")) == 4
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


def test_a_server_that_is_not_there_and_a_bad_address(tmp_path):
    assert generate(config(tmp_path, [["ok"]], "http://127.0.0.1:9/v1", retries=1)) == 3
    (error,) = read_json_lines(tmp_path / "out.jsonl.errors.jsonl")
    assert "URLError" in error["reason"]
    with pytest.raises(ConfigError, match="http"):
        generate(config(tmp_path, [["ok"]], "localhost:8000"))


@pytest.mark.parametrize(
    "reply", [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, [1]]
)
def test_replies_of_another_form_are_errors(reply, monkeypatch):
    server = Server(ServerConfig(endpoints=["http://x"], model="m"), 5)
    monkeypatch.setattr(server, "_send", lambda *args: reply)
    with pytest.raises(AnswerError):
        server.answer("http://x", [{"role": "user", "content": "hi"}])
