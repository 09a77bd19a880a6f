"""Jobs: many items of work on engines of a Ray cluster, with results that survive anything.

Who wants a job writes a `Task` (`razor_dist.jobs.task`): plain data that can be pickled, with

- ``settings``: what decides the results, plain JSON data; their hash guards the results' folder;
- ``engines``: ``{name: EngineConfig}``, for an evaluation one for each method;
- ``items()``: a list of ``Item(id, size, engine, data)``;
- ``run(llm, item)``: one item's result, plain JSON data. It is called in a process beside the
  engine's rank 0, with an `razor_dist.LLM` that nobody else uses meanwhile: ``generate``, ``chat``,
  ``prefill`` and ``prefill_chat`` with prefixes, ``stats``, ``get_tokenizer``.

and a command makes settings of class `JobConfig` (or one derived from it) of its flags and YAML
file, and calls ::

    from razor_dist.jobs.job import run_job

    summary = run_job(task, config, folder)       # Ray; config.ray = False: processes of this host
    settings, records = read_job(summary.folder)  # razor_dist.jobs.results

What happens in between: `job.run_task` opens the folder (`results`), skips what it holds, and has
`pool.run_items` hand the rest to engines, the longest first. An engine that fails (`EngineError`)
costs its item an attempt; one that is lost is opened anew; after ``attempts`` the item is recorded
as failed. Every result is in ``results.jsonl`` before the next is waited for (`results` tells of
its fields), and `progress` logs a line. `ray_engine` makes engines of Ray actors, `local_engine` of
processes. What is neither, a model that another library runs, is an engine whose settings are a
`config.ExternalEngineConfig`, which opens it.
"""
