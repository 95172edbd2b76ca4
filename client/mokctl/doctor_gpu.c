/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GPUs: driver, MPS, and the fabric between them. The driver is asked in a process of its own, since its libraries may
 * wait for a fabric that never comes up; that process is given two seconds.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "doctor.h"
#include "mok/types.h"
#include "mps_control.h"

/* ------------------------------------------------------------------ in the child */

/* As in nvml.h. */
struct fabric_info {
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};
enum { FABRIC_NOT_SUPPORTED, FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS, FABRIC_COMPLETED };

/* Prints "cuda VERSION GPUS", or "error ..." */
static void ask_cuda(void)
{
    int (*init)(unsigned) = NULL, (*version)(int *) = NULL, (*count)(int *) = NULL;
    int number = 0, gpus = 0;

    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("error libcuda.so.1 is not here\n");
        return;
    }
    *(void **)&init = dlsym(library, "cuInit");
    *(void **)&version = dlsym(library, "cuDriverGetVersion");
    *(void **)&count = dlsym(library, "cuDeviceGetCount");
    if (!init || !version || !count) {
        printf("error libcuda.so.1 lacks what CUDA has had for ten years\n");
        return;
    }
    int r = init(0);
    if (r != 0 || version(&number) != 0 || count(&gpus) != 0)
        printf("error cuInit: CUDA error %d\n", r);
    else
        printf("cuda %d.%d %d\n", number / 1000, number % 1000 / 10, gpus);
}

/* Prints "fabric STATE", the least advanced of all GPUs, or "error ..." */
static void ask_fabric(void)
{
    int (*init)(void) = NULL, (*count)(unsigned *) = NULL, (*handle)(unsigned, void **) = NULL;
    int (*info)(void *, struct fabric_info *) = NULL;
    unsigned gpus = 0, least = FABRIC_COMPLETED;

    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        printf("error libnvidia-ml.so.1 is not here\n");
        return;
    }
    *(void **)&init = dlsym(library, "nvmlInit_v2");
    *(void **)&count = dlsym(library, "nvmlDeviceGetCount_v2");
    *(void **)&handle = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&info = dlsym(library, "nvmlDeviceGetGpuFabricInfo");
    if (!init || !count || !handle || !info || init() != 0 || count(&gpus) != 0) {
        printf("error NVML does not say\n");
        return;
    }
    for (unsigned i = 0; i < gpus; i++) {
        struct fabric_info about = { .state = FABRIC_NOT_SUPPORTED };
        void *device = NULL;
        if (handle(i, &device) != 0 || info(device, &about) != 0)
            about.state = FABRIC_NOT_SUPPORTED;
        least = about.state < least ? about.state : least;
    }
    printf("fabric %u\n", gpus ? least : FABRIC_NOT_SUPPORTED);
}

/* ------------------------------------------------------------------ driver */

static void say_cuda(struct doctor *doctor, enum doctor_verdict bad, int length, const char *said)
{
    char version[128] = "", cuda[32] = "";
    int gpus = 0;

    if (length == -1) {
        doctor_say(doctor, "driver", bad,
                   "systemctl status nvidia-fabricmanager nvidia-imex; dmesg | grep -i nvrm: GPUs behind switches need "
                   "their fabric manager before CUDA",
                   "CUDA does not initialise within %d ms: the fabric of the GPUs is most likely not up",
                   DOCTOR_PATIENCE_MS);
        return;
    }
    if (sscanf(said, "cuda %31s %d", cuda, &gpus) != 2) {
        doctor_say(doctor, "driver", bad, "install the driver's libraries in the version of its kernel module", "%s",
                   strncmp(said, "error ", 6) == 0 ? said + 6 : "CUDA ends the process that asks it");
        return;
    }
    doctor_read_line("/sys/module/nvidia/version", version, sizeof(version));
    doctor_say(doctor, "driver", gpus > 0 ? DOCTOR_OK : bad, gpus > 0 ? NULL : "nvidia-smi says what the driver sees",
               "driver %s, CUDA %s, %d GPUs", version[0] ? version : "of unknown version", cuda, gpus);
}

/* Whether there is anything of GPUs to look at. */
static bool look_at_driver(struct doctor *doctor, bool wanted)
{
    bool module = access("/proc/driver/nvidia/version", F_OK) == 0;
    enum doctor_verdict bad = wanted ? DOCTOR_FAIL : DOCTOR_WARN;
    char said[256] = "";

    int length = doctor_ask_child(ask_cuda, said, sizeof(said));
    said[strcspn(said, "\n")] = '\0';
    if (!wanted && !module && strncmp(said, "error libcuda.so.1 is not", 25) == 0) {
        doctor_say(doctor, "driver", DOCTOR_NONE, NULL, "no NVIDIA driver and no device of kind cuda: none is needed");
        return false;
    }
    if (!module)
        doctor_say(doctor, "driver", bad, "install the NVIDIA driver, or modprobe nvidia",
                   "the kernel module nvidia is not loaded");
    else if (access("/dev/nvidia-uvm", F_OK) < 0)
        doctor_say(doctor, "driver", bad, "modprobe nvidia_uvm, before mokd and at each boot",
                   "/dev/nvidia-uvm is not there: CUDA cannot start");
    say_cuda(doctor, bad, length, said);
    return true;
}

/* ------------------------------------------------------------------ MPS */

static const char *pipes_of(const Mok__DeviceInfo *device)
{
    return device->kind == MOK_DEVICE_CUDA ? device->mps_pipe : "";
}

/* Every device from `first` on whose worker has the same control daemon. */
static void name_devices(const Mok__StatusReply *status, size_t first, char *ret, size_t size)
{
    size_t length = 0;

    ret[0] = '\0';
    for (size_t i = first; i < status->n_device && length < size; i++)
        if (strcmp(pipes_of(status->device[i]), pipes_of(status->device[first])) == 0)
            length +=
                (size_t)snprintf(ret + length, size - length, "%s%s", length ? ", " : "", status->device[i]->name);
}

static void look_at_control(struct doctor *doctor, size_t first)
{
    const Mok__StatusReply *status = doctor_status(doctor);
    const Mok__DeviceInfo *device = status->device[first];
    char names[96];

    name_devices(status, first, names, sizeof(names));
    int reason = mok_mps_answers(device->mps_pipe);
    if (reason == 0)
        doctor_say(doctor, "mps", DOCTOR_OK, NULL, "an MPS control daemon answers in %s, for %s", device->mps_pipe,
                   names);
    else if (reason == EACCES)
        doctor_say(doctor, "mps", DOCTOR_NONE, "mokctl doctor as root, or as mokd's user",
                   "%s is not for uid %u to look into: whether MPS answers there, for %s, is not known",
                   device->mps_pipe, getuid(), names);
    else
        doctor_say(doctor, "mps", DOCTOR_FAIL,
                   device->mps_own ? "journalctl -u mokd says why: mokd starts nvidia-cuda-mps-control itself"
                                   : "systemctl start mok-mps@GPU, or nvidia-cuda-mps-control -d as root",
                   "the workers of %s want MPS in %s, and nobody answers there (%s)", names, device->mps_pipe,
                   strerror(reason));
}

/* What the workers run under is each device's own affair: one control daemon may serve all, or each GPU have its own.
 */
static void look_at_mps(struct doctor *doctor)
{
    const Mok__StatusReply *status = doctor_status(doctor);
    bool shared = false;

    if (!status) {
        doctor_say(doctor, "mps", DOCTOR_NONE, NULL, "whether it is needed is mokd's to say");
        return;
    }
    for (size_t i = 0; i < status->n_device; i++) {
        bool seen = false;
        for (size_t before = 0; before < i; before++)
            seen = seen || strcmp(pipes_of(status->device[before]), pipes_of(status->device[i])) == 0;
        if (pipes_of(status->device[i])[0] && !seen)
            look_at_control(doctor, i);
        shared = shared || pipes_of(status->device[i])[0];
    }
    if (shared)
        return;
    if (doctor_has_gpu_devices(doctor))
        doctor_say(
            doctor, "mps", DOCTOR_NONE, "sharing = mps, where one user's fault may end the others': see mokd.conf",
            "mokd's GPUs are shared in turns: each hand-over between a job's kernels and MoK's costs a context switch");
    else
        doctor_say(doctor, "mps", DOCTOR_NONE, NULL, "mokd has no GPU: none is needed");
}

/* ------------------------------------------------------------------ fabric */

static void look_at_fabric(struct doctor *doctor)
{
    char said[128] = "";
    unsigned state = FABRIC_NOT_SUPPORTED;

    int length = doctor_ask_child(ask_fabric, said, sizeof(said));
    if (length == -1) {
        doctor_say(doctor, "fabric", DOCTOR_FAIL, "systemctl restart nvidia-fabricmanager nvidia-imex",
                   "the driver does not say within %d ms how its fabric is", DOCTOR_PATIENCE_MS);
        return;
    }
    said[strcspn(said, "\n")] = '\0';
    if (sscanf(said, "fabric %u", &state) != 1) {
        doctor_say(doctor, "fabric", DOCTOR_NONE, NULL, "%s", strncmp(said, "error ", 6) == 0 ? said + 6 : "not known");
        return;
    }
    if (state == FABRIC_NOT_SUPPORTED)
        doctor_say(doctor, "fabric", DOCTOR_NONE, NULL, "these GPUs are in no fabric of several nodes");
    else if (state != FABRIC_COMPLETED)
        doctor_say(doctor, "fabric", DOCTOR_FAIL, "systemctl status nvidia-fabricmanager nvidia-imex", "the fabric %s",
                   state == FABRIC_IN_PROGRESS ? "is still coming up" : "has not been started");
    else if (access("/dev/nvidia-caps-imex-channels/channel0", R_OK | W_OK) < 0)
        doctor_say(
            doctor, "fabric", DOCTOR_WARN,
            "systemctl start nvidia-imex; nvidia-modprobe -c 0 --imex-channels, and let mokd's group have channel0",
            "the fabric is up, but without /dev/nvidia-caps-imex-channels/channel0 no memory can be given to other "
            "nodes");
    else
        doctor_say(doctor, "fabric", DOCTOR_OK, NULL, "up, with a channel for memory of other nodes");
}

void doctor_gpu(struct doctor *doctor)
{
    bool wanted = doctor_has_gpu_devices(doctor);

    if (!look_at_driver(doctor, wanted)) {
        doctor_say(doctor, "mps", DOCTOR_NONE, NULL, "no GPU");
        doctor_say(doctor, "fabric", DOCTOR_NONE, NULL, "no GPU");
        return;
    }
    look_at_mps(doctor);
    look_at_fabric(doctor);
}
