"""An environment of verifiers, in its own words; the tests write it where verifiers finds it.

`counting_env`: one turn, or calls of a tool. `asking_env`: a user answers every turn, three times. Prompts of
`asking_env` from 3 on break: they hang, raise, or end the process. `forgetful`: a harness that shortens its history.
"""

COUNTING = '''
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Adder(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class Config(vf.TasksetConfig):
    count: int = 6


class Sum(vf.Task[Data, vf.State]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(str(task.answer) in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Counting(vf.Taskset[Sum, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]

    def load(self):
        for i in range(self.config.count):
            yield Sum(Data(prompt=f"{i}+{i}=", system_prompt="Be brief.", answer=2 * i), self.config.task)


__all__ = ["Counting"]

if __name__ == "__main__":
    Adder.run()
'''

ASKING = """
import asyncio, os, time
import verifiers.v1 as vf


class Data(vf.TaskData):
    kind: int = 0


class Config(vf.TasksetConfig):
    count: int = 8


class Ask(vf.Task[Data, vf.State]):
    @vf.reward
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or "") % 3)

    @vf.reward(weight=0.25)
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Asking(vf.Taskset[Ask, Config]):
    def load(self):
        for i in range(self.config.count):
            yield Ask(Data(prompt=f"problem {i}", kind=i), self.config.task)


class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class AskingEnv(vf.Env[EnvConfig]):
    async def run(self, task, agents):
        kind = task.data.kind
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            for turn in range(2):
                if kind == 3:
                    await asyncio.sleep(60)
                if kind == 4:
                    raise RuntimeError("the environment broke")
                if kind == 5:
                    time.sleep(60)
                if kind == 6:
                    os._exit(3)
                if said.terminated:
                    break
                said = await talk.turn(f"{turn}: " + "abcd" * (len(said.last_reply) % 5))


__all__ = ["Asking", "AskingEnv"]
"""

FORGETFUL = """
import httpx
import verifiers.v1 as vf


class Forgetful(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        begin = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {secret}"}) as http:
            for messages in (begin, begin[:1]):
                await http.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Forgetful"]
"""
