"""What kinds of boards and drivers do not report, for `FakeGpu(fails=...)` and `FakeNvml(missing=...)`."""

# Values that kinds of boards and drivers do not report: function -> error, for `FakeGpu(fails=...)`
CONSUMER_BOARD = {"nvmlDeviceGetTotalEccErrors": "NOT_SUPPORTED", "nvmlDeviceGetMigMode": "NOT_SUPPORTED"}
UNIFIED_MEMORY = {
    "nvmlDeviceGetMemoryInfo": "NOT_SUPPORTED",
    "nvmlDeviceGetFanSpeed": "NOT_SUPPORTED",
    "nvmlDeviceGetEnforcedPowerLimit": "NOT_SUPPORTED",
    "nvmlDeviceGetTotalEccErrors": "NOT_SUPPORTED",
    "nvmlDeviceGetMigMode": "NOT_SUPPORTED",
}
MIG_ENABLED = {"nvmlDeviceGetUtilizationRates": "NOT_SUPPORTED", "nvmlDeviceGetFanSpeed": "NOT_SUPPORTED"}
LOST = {"nvmlDeviceGetHandleByIndex": "GPU_IS_LOST"}

# Functions that drivers do not have yet, for `FakeNvml(missing=...)`
DRIVER_470 = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMemoryInfo_v2",
)
