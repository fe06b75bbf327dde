"""A server for models over HTTP and gRPC: the Open Inference Protocol v2, with Triton's extensions.

::

    clients ══ HTTP ══► uvicorn ─► http ──┐                          ┌─► Master of model A ═► its workers
            ══ gRPC ══► grpc.aio ─► grpc ─┴─► inference ─► models ───┴─► Master of model B ═► its workers
    browser ══ HTTP ══► live (a page of figures)

All runs in one event loop, and asks masters by `Master.predict_async`. The bytes of a request's body are
copied once, to memory of `Master.allocate`; those of an answer are sent from where the workers wrote them. A
request *uses* an instance of a model, whose master is open for as long.
"""
