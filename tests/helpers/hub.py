"""A hub on this machine that speaks as much of the Hugging Face API as masks need; huggingface_hub is its client."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories in memory: name -> branch -> path -> bytes."""

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.url = ""

    def post(self, path: str, body: bytes) -> tuple[int, dict]:
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}" if given.get("organization") else given["name"]
            known = name in self.repos
            self.repos.setdefault(name, {"main": {}})
            self.private.setdefault(name, bool(given.get("private")))
            return (409 if known else 200), {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        _, _, _, owner, name, action, *rest = path.split("/")
        branches = self.repos[f"{owner}/{name}"]
        if action == "branch":
            branches.setdefault(rest[0], dict(branches["main"]))
            return 200, {}
        if action == "preupload":
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                     for one in json.loads(body)["files"]]  # fmt: skip
            return 200, {"files": files}
        assert action == "commit"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                branches[rest[0]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        address = f"{self.url}/{owner}/{name}/commit/{COMMIT}"
        return 200, {"commitUrl": address, "commitOid": COMMIT, "pullRequestUrl": None}

    def file(self, path: str) -> bytes | None:
        """What /org/name/resolve/revision/path holds."""
        owner, name, _, revision, inside = path.lstrip("/").split("/", 4)
        branches = self.repos.get(f"{owner}/{name}", {})
        return branches.get("main" if revision == COMMIT else revision, {}).get(inside)


@contextmanager
def running() -> Iterator[Hub]:
    """Serve a hub until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, said = hub.post(self.path.partition("?")[0], body)
            self.answer(status, json.dumps(said).encode(), Content_Type="application/json")

        def do_GET(self) -> None:
            if self.path.startswith("/api/"):
                self.answer(404, b'{"error": "not here"}', X_Error_Code="EntryNotFound")
            elif (content := hub.file(self.path)) is None:
                known = "/".join(self.path.split("/")[1:3]) in hub.repos
                self.answer(404, b"", X_Error_Code="EntryNotFound" if known else "RepoNotFound")
            else:
                tag = f'"{hashlib.sha256(content).hexdigest()}"'
                self.answer(200, content, ETag=tag, X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
