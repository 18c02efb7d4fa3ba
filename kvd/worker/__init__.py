"""The worker: one process per loaded model. Its engine thread owns MLX, all other threads see host bytes only.

    main        process: options, leash, threads, exit         assemble    model, pool, identity and engine put together
    link        thread: the socket to the front                outbox      what is to be said
    beat        thread: signs of life                          service     from socket to engine: prepare, refuse
    prompt      threads: template, tokenizer, limits           params      a request as one frozen value (pure)
    tools       tools for templates that know none (pure)      grammar     answers of a given shape
    advice      rules for volatile text that would help (pure)

    engine      the loop on MLX's thread                       scheduler   what to do next (pure)
    admit       from the queue to the pool                     live        the requests there are
    room        who lacked room: is there enough now?
    generation  rows to answers, and how they end              compute     where rows go through the model
    sampler     drawing tokens                                 text        tokens to text: stops, reasoning, tool calls
    finish      storing the tail, waiting for commits          report      what a client is told
    request     a request and its choices

    spill       threads: finished blocks to the disk           restore     threads: shards into pool rows
    fetch       which stored blocks to bring in                planner     load or compute again? (pure)

A request: service prepares it -> engine queues it, asks the front what is stored -> admit matches memory, fetch
restores the rest -> chunks of prefill, the last row alone -> tokens in batches -> finish stores the tail, says done.
"""
