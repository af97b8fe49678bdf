"""How fast messages move through the product's full stack, next to raw sockets in the same run.

ends.py       two processes that hold one end each of several ways to move the same bytes
raw.py        blocking sockets, TLS sockets, `asyncio.StreamReader`, gloo, an echo
product.py    the product's groups, over the same sockets
rounds.py     whole rounds of a real syncer against their floor
apart.py      the raw transfer in processes of its own, beside a training thread
training.py   what the machinery costs a training thread
"""
