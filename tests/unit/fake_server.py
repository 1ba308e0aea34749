"""A script: what a benchmark needs of an OpenAI server, without a model.

python fake_server.py RECORD [--stubborn] [--dies] [--silent] --host H --port P ...

Every body that /v1/completions receives is a line of RECORD; the first line is the id of a child
process that ends only when it is killed.
"""

import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGES = {
    "/health": {},
    "/v1/models": {"data": [{"id": "fake", "max_model_len": 64}]},
    "/corun/report": {
        "policy": "isolate",
        "domain": "corun1-x",
        "workers": [{"violation_count": 0}],
    },
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _send(self, kind, body, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        page = PAGES.get(self.path)
        status = 404 if page is None else 200
        self._send("application/json", json.dumps(page or {}).encode(), status)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(record, "a") as file:
            file.write(json.dumps(body) + "\n")
        if body.get("seed") == 666:
            self._send("application/json", b'{"error": "no such luck"}', 500)
            return
        words = [f"w{body.get('seed', 0)}-{i} " for i in range(body["max_tokens"])]
        chunks = [{"choices": [{"index": 0, "text": word}]} for word in words]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(words)}
        chunks.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        self._send("text/event-stream", "".join(lines).encode())


record = sys.argv[1]
print("a line of the log", flush=True)
if "--dies" in sys.argv:
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(record, "w") as file:
    file.write(f"{child.pid}\n")
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--silent" in sys.argv:
    time.sleep(600)
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()
