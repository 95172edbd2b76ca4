/* SPDX-License-Identifier: Apache-2.0 */
#include "reload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "rack_node.h"
#include "service.h"
#include "user.h"

struct reload {
    uv_work_t work;
    struct mokd_server *server;
    struct mokd_config config;
    char path[4096];
    int result;
    char first[256]; /* of what is wrong with it */
};

/* The log may be written by any thread. */
static void report(void *cookie, const char *sentence)
{
    struct reload *reload = cookie;
    char clean[MOKD_TEXT_MAX];

    mok_log(MOK_LOG_ERROR, "config", "wrong", "error=\"%s\"", mok_log_text(clean, sizeof(clean), sentence));
    if (!reload->first[0])
        snprintf(reload->first, sizeof(reload->first), "configuration not read again: %.200s", clean);
}

static void read_again(uv_work_t *work)
{
    struct reload *reload = work->data;
    reload->result = mokd_config_load(reload->path, report, reload, &reload->config);
}

static bool same_devices(const struct mokd_config *a, const struct mokd_config *b)
{
    if (a->n_devices != b->n_devices)
        return false;
    for (size_t i = 0; i < a->n_devices; i++) {
        const struct mokd_device_config *x = &a->devices[i], *y = &b->devices[i];
        if (strcmp(x->name, y->name) != 0 || x->kind != y->kind || x->threads != y->threads || x->memory != y->memory ||
            x->cuda != y->cuda || x->reserve_sms != y->reserve_sms || x->yield_us != y->yield_us ||
            x->chaos_delay_us != y->chaos_delay_us)
            return false;
    }
    return true;
}

static bool same_daemon(const struct mokd_config *a, const struct mokd_config *b)
{
    return strcmp(a->socket, b->socket) == 0 && strcmp(a->worker, b->worker) == 0 && a->socket_mode == b->socket_mode &&
           a->poll_us == b->poll_us && a->resume_timeout == b->resume_timeout &&
           strcmp(a->admin_socket, b->admin_socket) == 0 && a->admin_socket_mode == b->admin_socket_mode &&
           a->start_timeout == b->start_timeout && a->worker_timeout == b->worker_timeout &&
           a->device_failure == b->device_failure && a->sharing == b->sharing &&
           strcmp(a->mps_pipe, b->mps_pipe) == 0 && a->mps == b->mps &&
           strcmp(a->metrics_listen, b->metrics_listen) == 0 && a->metrics_mode == b->metrics_mode;
}

/* Bits of devices are by place: with other devices in the file they would mean others than those that run. */
static bool can_be_taken_over(const struct mokd_config *now, const struct mokd_config *next)
{
    if (now->n_devices != next->n_devices)
        return false;
    for (size_t i = 0; i < now->n_devices; i++)
        if (strcmp(now->devices[i].name, next->devices[i].name) != 0)
            return false;
    return true;
}

static void swap_tenants(struct mokd_config *now, struct mokd_config *next)
{
    struct mokd_config old = *now;

    now->log_level = next->log_level;
    now->has_admin_group = next->has_admin_group;
    now->admin_gid = next->admin_gid;
    now->limits = next->limits;
    now->users = next->users;
    now->n_users = next->n_users;
    now->groups = next->groups;
    now->n_groups = next->n_groups;
    next->users = old.users;
    next->n_users = old.n_users;
    next->groups = old.groups;
    next->n_groups = old.n_groups;
}

static void take_over(struct mokd_server *server, struct mokd_config *next, char *ret_failure, size_t size)
{
    if (!can_be_taken_over(server->config, next)) {
        mok_log(MOK_LOG_ERROR, "config", "not reloaded: the devices are others; restart mokd", NULL);
        snprintf(ret_failure, size, "configuration not read again: the devices are others, which needs a restart");
        return;
    }
    if (!same_devices(server->config, next) || !same_daemon(server->config, next))
        mok_log(MOK_LOG_WARNING, "config", "what [daemon] and [device] say anew needs a restart of mokd", NULL);
    swap_tenants(server->config, next);
    mok_log_set_level(server->config->log_level);
    mokd_users_reload(server);
    mokd_rack_reload(server, next, ret_failure, size);
    mok_log(MOK_LOG_NOTICE, "config", "reloaded", "path=%s users=%zu groups=%zu", server->config->path,
            server->config->n_users, server->config->n_groups);
}

static void taken(uv_work_t *work, int status)
{
    struct reload *reload = work->data;

    reload->server->reloading = false;
    if (status < 0 || reload->result < 0) {
        mok_log(MOK_LOG_ERROR, "config", "not reloaded: what was read before holds", NULL);
    } else {
        if (!reload->server->stopping)
            take_over(reload->server, &reload->config, reload->first, sizeof(reload->first));
        mokd_config_release(&reload->config);
    }
    if (reload->server->service)
        mokd_service_reloaded(reload->server->service, reload->first);
    if (reload->server->reload_again && !reload->server->stopping)
        mokd_reload(reload->server);
    free(reload);
}

void mokd_reload(struct mokd_server *server)
{
    server->reload_again = server->reloading;
    if (server->reloading)
        return;
    struct reload *reload = calloc(1, sizeof(*reload));
    if (!reload) {
        mok_log(MOK_LOG_WARNING, "config", "not reloaded: mokd is out of memory", NULL);
        return;
    }
    reload->server = server;
    reload->work.data = reload;
    snprintf(reload->path, sizeof(reload->path), "%s", server->config->path);
    server->reloading = true;
    if (uv_queue_work(&server->loop, &reload->work, read_again, taken) < 0)
        taken(&reload->work, UV_ECANCELED);
}
