"""The variables by which SageMaker configures a container that serves, and its command `serve`.

`docker run IMAGE serve` runs `serve` in the container. There `container_command` is what that
program has to become. A variable that is not set leaves the server's own default.

| variable | default | meaning here |
| --- | --- | --- |
| SAGEMAKER_BIND_TO_PORT | 8080 | port |
| SAGEMAKER_MULTI_MODEL | false | models come and go by POST and DELETE of `/models` |
| SAGEMAKER_TFS_DEFAULT_MODEL_NAME | - | the default model |
| SAGEMAKER_MODEL_SERVER_WORKERS | - | workers |
| SAGEMAKER_TFS_INSTANCE_COUNT | - | workers, if the above is not set and it is above 1 |
| SAGEMAKER_TFS_ENABLE_BATCHING | false | needed for the two below to have an effect |
| SAGEMAKER_TFS_MAX_BATCH_SIZE | 8 | rows of a batch |
| SAGEMAKER_TFS_MAX_ENQUEUED_BATCHES | - | batches that may wait, of that many rows each |
| SAGEMAKER_MODEL_SERVER_TIMEOUT | 60 | s that a request may take |
| SAGEMAKER_TFS_WAIT_TIME_SECONDS, SAGEMAKER_STARTUP_TIMEOUT | 300 | s until models are loaded |
| SAGEMAKER_MAX_PAYLOAD_IN_MB | - | MiB of a body |
| SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT | application/json | answers' type for a client of any |
| SAGEMAKER_TFS_INTRA_OP_PARALLELISM, ..._INTER_... | 0 | threads of a worker; 0 lets nanotf decide |
| SAGEMAKER_PROGRAM | inference.py | must be this |

Not read, since there is nothing here that they could configure: those of nginx and gunicorn, and
SAGEMAKER_TFS_BATCH_TIMEOUT_MICROS and SAGEMAKER_TFS_NUM_BATCH_THREADS: no batch waits for a timer,
and each worker is a batch's thread. Sources: the README and `serve.py` of
aws/sagemaker-tensorflow-serving-container; `parameters.py` of aws/sagemaker-inference-toolkit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
"""
"""
