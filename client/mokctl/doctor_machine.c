/* SPDX-License-Identifier: Apache-2.0 */
/* The machine: processor, kernel, pages, the service manager, and what this user's own processes may have. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "doctor.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#define CLIENT_DESCRIPTORS 1024u

static void look_at_processor(struct doctor *doctor)
{
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = __builtin_cpu_supports("avx512f");

    if (avx2)
        doctor_say(doctor, "processor", DOCTOR_OK, NULL, "has AVX2 and FMA%s, of which host devices' experts are made",
                   avx512 ? " and AVX-512 (which OpenBLAS may use)" : "");
    else
        doctor_say(doctor, "processor", DOCTOR_WARN, "use GPUs, or a machine of the last ten years",
                   "has no AVX2 and FMA: host devices compute by general code, many times slower");
#else
    doctor_say(doctor, "processor", DOCTOR_NONE, NULL, "no x86-64: host devices compute by general code");
#endif
}

/* What queues and buffers cannot do without: sealed memory, and descriptors of processes. */
static void look_at_kernel(struct doctor *doctor)
{
    struct utsname name;
    int fd = memfd_create("mok-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool seals = fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0;
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);

    mok_close(fd);
    mok_close(pidfd);
    uname(&name);
    if (!seals || pidfd < 0)
        doctor_say(doctor, "kernel", DOCTOR_FAIL,
                   "Linux 5.4 or later; or a container profile that lets memfd_create, pidfd_open pass",
                   "%s %s does not give %s", name.sysname, name.release,
                   seals ? "pidfds" : "memory that is sealed against writing");
    else
        doctor_say(doctor, "kernel", DOCTOR_OK, NULL, "%s %s has sealed memory and pidfds", name.sysname, name.release);
}

/* Buffers are shared memory: what the kernel does about large pages of those is a setting of its own. */
static void look_at_pages(struct doctor *doctor)
{
    char line[128] = "", *chosen;
    const char *path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

    if (!doctor_read_line(path, line, sizeof(line)) || !(chosen = strchr(line, '['))) {
        doctor_say(doctor, "pages", DOCTOR_NONE, NULL,
                   "this kernel does not say whether shared memory gets large pages");
        return;
    }
    chosen++;
    chosen[strcspn(chosen, "]")] = '\0';
    if (strcmp(chosen, "always") == 0 || strcmp(chosen, "within_size") == 0 || strcmp(chosen, "force") == 0)
        doctor_say(doctor, "pages", DOCTOR_OK, NULL, "shared memory gets large pages (%s)", chosen);
    else
        doctor_say(
            doctor, "pages", DOCTOR_NONE,
            "for large layers on host devices: echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "host devices' memory is in small pages (%s); GPUs' is not concerned", chosen);
}

static void look_at_own_limits(struct doctor *doctor)
{
    struct rlimit files;

    if (getrlimit(RLIMIT_NOFILE, &files) < 0)
        return;
    if (files.rlim_max < CLIENT_DESCRIPTORS)
        doctor_say(doctor, "own limits", DOCTOR_WARN, "ulimit -Hn, or nofile in /etc/security/limits.conf",
                   "this user's processes may have %" PRIu64 " descriptors; a job takes one a buffer and three a queue",
                   (uint64_t)files.rlim_max);
    else
        doctor_say(doctor, "own limits", DOCTOR_OK, NULL, "this user's processes may have %" PRIu64 " descriptors",
                   (uint64_t)files.rlim_max);
}

/* "KEY=value" lines of systemctl show. */
static void take_value(const char *said, const char *key, char *ret, size_t size)
{
    const char *at = strstr(said, key);

    ret[0] = '\0';
    if (at)
        snprintf(ret, size, "%.*s", (int)strcspn(at + strlen(key), "\n"), at + strlen(key));
}

static void look_at_unit(struct doctor *doctor)
{
    static const char *const argv[] = {
        "systemctl", "show", "mokd.service", "-p", "LoadState,ActiveState,SubState,Result,NRestarts", NULL
    };
    char said[1024] = "", load[32], active[32], result[32], restarts[16];

    if (access("/run/systemd/system", F_OK) < 0) {
        doctor_say(doctor, "unit", DOCTOR_NONE, NULL, "no systemd runs this machine");
        return;
    }
    int length = doctor_ask_program(argv, said, sizeof(said));
    if (length < 0) {
        doctor_say(doctor, "unit", DOCTOR_WARN, "systemctl status mokd", "systemctl %s",
                   length == -1 ? "does not answer" : "says nothing of mokd.service");
        return;
    }
    take_value(said, "LoadState=", load, sizeof(load));
    take_value(said, "ActiveState=", active, sizeof(active));
    take_value(said, "Result=", result, sizeof(result));
    take_value(said, "NRestarts=", restarts, sizeof(restarts));
    if (strcmp(load, "loaded") != 0)
        doctor_say(doctor, "unit", DOCTOR_NONE, NULL, "mokd.service is %s: mokd is not run by systemd here",
                   load[0] ? load : "unknown");
    else if (strcmp(active, "failed") == 0)
        doctor_say(doctor, "unit", DOCTOR_FAIL,
                   "journalctl -u mokd -e; then systemctl reset-failed mokd, systemctl start mokd",
                   "mokd.service has failed: %s", result);
    else if (strcmp(active, "active") != 0)
        doctor_say(doctor, "unit", DOCTOR_WARN, "systemctl enable --now mokd", "mokd.service is %s", active);
    else
        doctor_say(doctor, "unit", strtoul(restarts, NULL, 10) > 0 ? DOCTOR_WARN : DOCTOR_OK,
                   strtoul(restarts, NULL, 10) > 0 ? "journalctl -u mokd says why" : NULL,
                   "mokd.service is active, started again %s times", restarts[0] ? restarts : "0");
}

void doctor_machine(struct doctor *doctor)
{
    look_at_processor(doctor);
    look_at_kernel(doctor);
    look_at_pages(doctor);
    look_at_own_limits(doctor);
    look_at_unit(doctor);
}
