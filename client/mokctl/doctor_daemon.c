/* SPDX-License-Identifier: Apache-2.0 */
/* mokd itself: whether it can be reached, what it says of devices and peers, what its process may have, its files. */
#include <errno.h>
#include <grp.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "doctor.h"
#include "error.h"
#include "mok/mok.h"
#include "mokctl.h"
#include "names.h"

#define DEFAULT_CONFIG "/etc/mok/mokd.conf"
/* What fewer jobs than one would think can use up, and what no rack with large layers does. */
#define FEW_DESCRIPTORS 4096u
#define PLENTY_DESCRIPTORS 65536u

/* ------------------------------------------------------------------ reaching it */

static void say_who_may(struct doctor *doctor, const char *path, const struct stat *about)
{
    const struct group *group = getgrgid(about->st_gid);
    char remedy[200];

    snprintf(remedy, sizeof(remedy), "usermod -aG %s USER, and log in again; or socket_mode in %s",
             group ? group->gr_name : "GROUP", DEFAULT_CONFIG);
    doctor_say(doctor, "socket", DOCTOR_FAIL, remedy, "%s (mode %04o, uid %u, gid %u) is not open to uid %u", path,
               about->st_mode & 07777, about->st_uid, about->st_gid, getuid());
}

static void say_unreachable(struct doctor *doctor, int code)
{
    const char *path = control_socket_path(doctor->socket);
    struct stat about;

    if (stat(path, &about) < 0)
        doctor_say(doctor, "socket", DOCTOR_FAIL,
                   "systemctl start mokd, or mokd --config FILE; or name its socket with --socket or $MOK_SOCKET",
                   "%s: %s: no mokd listens there", path, strerror(errno));
    else if (code == -MOK_EACCESS)
        say_who_may(doctor, path, &about);
    else if (code == -MOK_ETIMEDOUT)
        doctor_say(doctor, "socket", DOCTOR_FAIL, "journalctl -u mokd says why; systemctl restart mokd",
                   "%s: mokd does not answer", path);
    else
        doctor_say(doctor, "socket", DOCTOR_FAIL, "systemctl status mokd", "%s: %s", path, client_last_error());
}

static bool reach(struct doctor *doctor)
{
    int r = mokctl_connect(doctor->socket, DOCTOR_PATIENCE_MS, &doctor->control, &doctor->hello);

    if (r == 0)
        r = mokctl_ask_status(doctor->control, DOCTOR_PATIENCE_MS, &doctor->status);
    if (r < 0) {
        say_unreachable(doctor, r);
        return false;
    }
    doctor_say(doctor, "socket", DOCTOR_OK, NULL, "mokd answers at %s, pid %u", control_socket_path(doctor->socket),
               doctor_status(doctor)->pid);
    return true;
}

static void look_at_versions(struct doctor *doctor)
{
    const char *daemon = doctor->hello.reply->hello->daemon_version;

    if (strcmp(daemon, mok_version()) == 0)
        doctor_say(doctor, "versions", DOCTOR_OK, NULL, "mokd, libmok and mokctl are %s", daemon);
    else
        doctor_say(doctor, "versions", DOCTOR_WARN, "upgrade the older, then systemctl restart mokd",
                   "mokd is %s, libmok and mokctl are %s: they speak to each other, but one is older", daemon,
                   mok_version());
}

/* ------------------------------------------------------------------ what it says */

static void look_at_devices(struct doctor *doctor)
{
    const Mok__StatusReply *status = doctor_status(doctor);
    unsigned well = 0;

    for (size_t i = 0; i < status->n_device; i++) {
        const Mok__DeviceInfo *device = status->device[i];
        well += device->state == MOK__DEVICE_STATE__DEVICE_UP && !device->draining;
        if (device->state != MOK__DEVICE_STATE__DEVICE_UP)
            doctor_say(doctor, "device", device->state == MOK__DEVICE_STATE__DEVICE_FAILED ? DOCTOR_FAIL : DOCTOR_WARN,
                       "journalctl -u mokd; mokd tries a failed device again when it is restarted", "%s is %s: %s",
                       device->name, mokctl_device_state(device->state), device->reason);
        else if (device->draining)
            doctor_say(doctor, "device", DOCTOR_WARN, "mokctl undrain, when the work on it is done",
                       "%s is being drained: no new group gets it", device->name);
        if (device->restarts > 0)
            doctor_say(doctor, "device", DOCTOR_WARN, "journalctl -u mokd says of what its workers died",
                       "the worker of %s was started again %u times", device->name, device->restarts);
    }
    if (well > 0)
        doctor_say(doctor, "devices", DOCTOR_OK, NULL, "%u of %zu are up", well, status->n_device);
}

/* What the drivers of GPUs in a link domain say of memory for other hosts. */
static void look_at_fabric_handles(struct doctor *doctor)
{
    const Mok__StatusReply *status = doctor_status(doctor);

    for (size_t i = 0; i < status->n_device; i++) {
        const Mok__DeviceInfo *device = status->device[i];
        if (device->fabric)
            doctor_say(doctor, "handles", DOCTOR_OK, NULL, "%s: the driver exports and imports fabric handles",
                       device->name);
        else if (device->no_fabric[0])
            doctor_say(doctor, "handles", DOCTOR_NONE, NULL, "%s has none for other hosts: %s", device->name,
                       device->no_fabric);
    }
}

/* A device that promises more than the machine has ends with the kernel killing something. */
static void look_at_memory(struct doctor *doctor)
{
    const Mok__StatusReply *status = doctor_status(doctor);
    uint64_t promised = 0, has = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);

    for (size_t i = 0; i < status->n_device; i++)
        if (status->device[i]->kind == MOK_DEVICE_HOST)
            promised += status->device[i]->memory_bytes;
    if (promised == 0)
        return;
    if (promised > has / 10 * 9)
        doctor_say(doctor, "memory", DOCTOR_WARN, "lower memory in the [device NAME] sections of " DEFAULT_CONFIG,
                   "host devices may hand out %" PRIu64 " MiB, and this machine has %" PRIu64 " MiB in all",
                   promised >> 20, has >> 20);
    else
        doctor_say(doctor, "memory", DOCTOR_OK, NULL,
                   "host devices may hand out %" PRIu64 " MiB of this machine's %" PRIu64 " MiB", promised >> 20,
                   has >> 20);
}

static void say_node(struct doctor *doctor, const Mok__RackNode *node)
{
    if (strcmp(node->state, "left") == 0)
        doctor_say(doctor, "peer", DOCTOR_WARN,
                   "systemctl start mokd on that node, when what it was stopped for is done",
                   "node %s at %s was stopped in order", node->name, node->address);
    else if (strcmp(node->state, "up") != 0)
        doctor_say(doctor, "peer", DOCTOR_FAIL, "mokctl doctor on that node; then cables, firewall, and keys on both",
                   "node %s at %s is %s: %s", node->name, node->address, node->state,
                   node->error[0] ? node->error : "has not been heard of");
    else if (!node->inventory_agrees)
        doctor_say(doctor, "peer", DOCTOR_WARN, "give both nodes the same [node NAME] sections, and reload",
                   "node %s has another inventory of the rack than this one", node->name);
    else if (node->tenants_differ)
        doctor_say(doctor, "peer", DOCTOR_WARN,
                   "give both nodes the same [limits], [user NAME] and [group NAME] sections, and reload",
                   "node %s has other limits and weights of users than this one", node->name);
}

static void look_at_peers(struct doctor *doctor)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__RackQuery body = MOK__RACK_QUERY__INIT;
    unsigned up = 0, others = 0;

    request.body_case = MOK__REQUEST__BODY_RACK_QUERY;
    request.rack_query = &body;
    if (control_call(doctor->control, &request, DOCTOR_PATIENCE_MS, MOK__REPLY__BODY_RACK, 0, &answer) < 0) {
        doctor_say(doctor, "peers", DOCTOR_NONE, NULL, "this node is in no rack");
        return;
    }
    const Mok__RackReply *rack = answer.reply->rack;
    for (size_t i = 0; i < rack->n_node; i++) {
        if (rack->node[i]->self)
            continue;
        others++;
        up += strcmp(rack->node[i]->state, "up") == 0;
        say_node(doctor, rack->node[i]);
    }
    if (up == others)
        doctor_say(doctor, "peers", DOCTOR_OK, NULL, "all %u other nodes of the rack are up", others);
    if (rack->refused_lately > 0)
        doctor_say(doctor, "peers", DOCTOR_WARN, "compare the key of each node with its [node NAME] section here",
                   "%" PRIu64 " connections with a key that is not in the inventory in the last 5 minutes, "
                   "the last one %" PRIu64 " s ago from %s",
                   rack->refused_lately, rack->refused_age_ms / 1000, rack->refused_from);
}

/* ------------------------------------------------------------------ limits of its process */

/* The soft limit in /proc/PID/limits; false: cannot be read. UINT64_MAX: none. */
static bool limit_of(uint32_t pid, const char *name, uint64_t *ret)
{
    char path[64], line[256];
    bool found = false;

    snprintf(path, sizeof(path), "/proc/%u/limits", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    while (!found && fgets(line, sizeof(line), file)) {
        if (strncmp(line, name, strlen(name)) != 0)
            continue;
        const char *value = line + strlen(name) + strspn(line + strlen(name), " ");
        *ret = strncmp(value, "unlimited", 9) == 0 ? UINT64_MAX : strtoull(value, NULL, 10);
        found = true;
    }
    fclose(file);
    return found;
}

static void look_at_limits(struct doctor *doctor)
{
    uint32_t pid = doctor_status(doctor)->pid;
    uint64_t files, locked;

    if (!limit_of(pid, "Max open files", &files) || !limit_of(pid, "Max locked memory", &locked)) {
        doctor_say(doctor, "limits", DOCTOR_NONE, NULL, "the limits of process %u cannot be read here", pid);
        return;
    }
    if (files < PLENTY_DESCRIPTORS)
        doctor_say(doctor, "descriptors", files < FEW_DESCRIPTORS ? DOCTOR_FAIL : DOCTOR_WARN,
                   "LimitNOFILE=524288 in the unit, or ulimit -n before mokd starts",
                   "mokd may have %" PRIu64 " descriptors: each buffer, queue and connection takes some", files);
    else
        doctor_say(doctor, "descriptors", DOCTOR_OK, NULL, "mokd may have %" PRIu64, files);
    if (!doctor_has_gpu_devices(doctor))
        doctor_say(doctor, "memlock", DOCTOR_NONE, NULL, "only GPUs need locked memory, and mokd has none");
    else if (locked != UINT64_MAX)
        doctor_say(doctor, "memlock", DOCTOR_FAIL, "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
                   "mokd and its workers may lock %" PRIu64 " bytes: a GPU's driver pins more", locked);
    else
        doctor_say(doctor, "memlock", DOCTOR_OK, NULL, "not limited");
}

/* ------------------------------------------------------------------ files */

static void look_at_directory(struct doctor *doctor)
{
    char path[PATH_MAX];
    struct stat about;

    snprintf(path, sizeof(path), "%s", control_socket_path(doctor->socket));
    const char *directory = dirname(path);
    if (stat(directory, &about) < 0)
        return;
    if ((about.st_mode & S_IWOTH) && !(about.st_mode & S_ISVTX))
        doctor_say(doctor, "directory", DOCTOR_FAIL, "chmod o-w the directory",
                   "everyone may put another socket in the place of mokd's in %s (mode %04o)", directory,
                   about.st_mode & 07777);
    else
        doctor_say(doctor, "directory", DOCTOR_OK, NULL, "%s has mode %04o", directory, about.st_mode & 07777);
}

/* mokd beside mokctl, in the build tree or when installed. */
static bool find_mokd(char *ret, size_t size)
{
    static const char *const places[] = { "mokd", "../daemon/mokd/mokd", "../sbin/mokd" };
    char own[PATH_MAX];

    ssize_t length = readlink("/proc/self/exe", own, sizeof(own) - 1);
    own[length > 0 ? length : 0] = '\0';
    const char *directory = dirname(own);
    for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
        int n = snprintf(ret, size, "%s/%s", directory, places[i]);
        if (n > 0 && (size_t)n < size && access(ret, X_OK) == 0)
            return true;
    }
    return false;
}

const char *doctor_config(const struct doctor *doctor)
{
    const Mok__StatusReply *status = doctor_status(doctor);

    if (doctor->config)
        return doctor->config;
    return status && status->config[0] ? status->config : DEFAULT_CONFIG;
}

static void look_at_config(struct doctor *doctor)
{
    const char *path = doctor_config(doctor);
    bool known = doctor->config || strcmp(path, DEFAULT_CONFIG) != 0;
    char program[PATH_MAX], said[400] = "";
    struct stat about;

    if (stat(path, &about) < 0) {
        doctor_say(doctor, "config", known ? DOCTOR_FAIL : DOCTOR_NONE,
                   known ? "name the file that mokd reads" : NULL, "%s: %s", path, strerror(errno));
        return;
    }
    if (about.st_mode & S_IWOTH) {
        doctor_say(doctor, "config", DOCTOR_FAIL, "chmod o-w the file", "everyone may change %s (mode %04o)", path,
                   about.st_mode & 07777);
        return;
    }
    if (access(path, R_OK) < 0 || !find_mokd(program, sizeof(program))) {
        doctor_say(doctor, "config", DOCTOR_NONE, NULL, "%s cannot be checked from here", path);
        return;
    }
    const char *const argv[] = { program, "--check-config", "--config", path, NULL };
    int length = doctor_ask_program(argv, said, sizeof(said));
    said[strcspn(said, "\n")] = '\0';
    if (length >= 0)
        doctor_say(doctor, "config", DOCTOR_OK, NULL, "%s is without error", path);
    else if (length == -1)
        doctor_say(doctor, "config", DOCTOR_WARN, "names of users and groups are asked of a name server: see to that",
                   "%s was not checked in %d ms", path, DOCTOR_PATIENCE_MS);
    else
        doctor_say(doctor, "config", DOCTOR_FAIL, "mokd --check-config says all that is wrong", "%s", said);
}

void doctor_daemon(struct doctor *doctor)
{
    if (reach(doctor)) {
        look_at_versions(doctor);
        look_at_devices(doctor);
        look_at_fabric_handles(doctor);
        look_at_memory(doctor);
        look_at_limits(doctor);
        look_at_peers(doctor);
    }
    look_at_directory(doctor);
    look_at_config(doctor);
}
