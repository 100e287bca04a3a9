"""Tasks in files of their own."""

import textwrap

FUNCTIONS = """
import ctypes, faulthandler, os, subprocess, sys, time

def prompt(i):
    return f"What is {i} + {i}?", 2 * i

def solution(answer):
    return f"It is {answer}"

def reward(answer, text):
    if text == "hang":
        while True:
            pass
    if text == "hang hard":
        faulthandler.cancel_dump_traceback_later()  # so it does not end itself
        time.sleep(1000)
    if text.startswith("hang and tell "):
        open(text[14:], "w").close()
        while True:
            pass
    if text == "sleep in C":
        time.sleep(1000)
    if text == "raise":
        raise KeyError("oh")
    if text == "exit":
        os._exit(7)
    if text == "crash":
        ctypes.string_at(0)
    if text == "quit":
        sys.exit("bye")
    if text == "print":
        print("noise", flush=True)
        os.write(1, b"more noise" * 10000)
    if text == "read":
        return float(input())
    if text == "nan":
        return float("nan")
    if text == "pid":
        return os.getpid()
    if text.startswith("long"):
        return len(text)
    if text.startswith("start "):
        pid = subprocess.Popen(["sleep", "1000"]).pid
        open(text[6:], "w").write(str(pid))
        time.sleep(1000)
    if text == "eat":
        return float(len(bytearray(4 << 30)))
    return float(text.split()[-1] == str(answer))
"""


def write(path, source):
    path.write_text(textwrap.dedent(source))
    return str(path)
