"""examples/many_at_once.py: waiting without threads."""

import asyncio

import ray_pools as pools


def square(number):
    return number * number


async def main():
    client = await pools.connect_async()
    async with client.slot_async(requester="research", gpus=1) as slot:
        print("in pool", slot.pool)
    calls = [client.run_async(square, n, requester="research", gpus=1, retries=5) for n in range(4)]
    print(await asyncio.gather(*calls))
    async for answer in client.map_async(square, range(8), requester="research", gpus=1, ordered=False):
        print(answer)


asyncio.run(main())
