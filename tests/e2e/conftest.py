"""Servers in processes of their own, as a person starts them."""

import contextlib
import re
import subprocess
import sys
import threading

import httpx
import pytest


class ServerProcess:
    """`leadframe serve` in a process of its own.

    Attributes:
      url: where it answers.
      lines: what it has printed.
    """

    def __init__(self, *args, env=None):
        command = [sys.executable, "-m", "leadframe.cli.main", "serve", "--port", "0", *args]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        self.lines = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(240)
        found = re.search(r"^serving .* at (http://\S+)", "".join(self.lines), re.MULTILINE)
        if found is None:
            status = self.stop()
            raise RuntimeError(f"no server, status {status}:\n" + "".join(self.lines))
        self.url = found[1]
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            if line.strip().startswith("curl "):
                self._ready.set()
        self._ready.set()

    def metrics(self):
        """Samples without labels other than the model's name, by name."""
        found = {}
        for line in self.http.get("/metrics").text.splitlines():
            match = re.fullmatch(r'leadframe_(\w+)\{model_name="[^"]*"\} (\S+)', line)
            if match:
                found[match[1]] = float(match[2])
        return found

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        self.process.stdout.close()
        return self.process.returncode


@pytest.fixture(scope="session")
def serve():
    """Context manager: `with serve(*args) as server`."""

    @contextlib.contextmanager
    def start(*args, env=None):
        server = ServerProcess(*args, env=env)
        try:
            yield server
        finally:
            server.http.close()
            server.stop()

    return start
