/* SPDX-License-Identifier: Apache-2.0 */
#include "http.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <microhttpd.h>

#include "endpoint.h"
#include "metrics.h"
#include "status_page.h"

#define MAX_CONNECTIONS 64u
#define IDLE_S 10u
/* However slowly the other end takes what it asked for; and while all places are taken, when others wait. */
#define WHOLE_NS 30000000000ull
#define CROWDED_NS 300000000ull
#define LOOK_MS 1000u
#define CROWDED_LOOK_MS 100u
/* Of a connection's request; answers are beside it. */
#define REQUEST_BYTES 16384u

struct mokd_http {
    struct mokd_server *server;
    struct mokd_endpoint endpoint;
    struct MHD_Daemon *daemon;
    uv_poll_t poll;
    uv_timer_t timer;
    unsigned open_handles;
    uint64_t scrapes;
    bool closed; /* a connection was, since this was reset */
    struct {
        int fd; /* -1: free */
        uint64_t since_ns;
    } connection[MAX_CONNECTIONS];
};

uint64_t mokd_http_scrapes(const struct mokd_http *http)
{
    return http ? http->scrapes : 0;
}

/* ------------------------------------------------------------------ connections */

static void on_connection(void *cookie, struct MHD_Connection *connection, void **socket_context,
                          enum MHD_ConnectionNotificationCode code)
{
    struct mokd_http *http = cookie;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);

    (void)socket_context;
    for (size_t i = 0; info && i < MAX_CONNECTIONS; i++) {
        if (code == MHD_CONNECTION_NOTIFY_STARTED && http->connection[i].fd < 0) {
            http->connection[i].fd = info->connect_fd;
            http->connection[i].since_ns = mok_now_ns();
            return;
        }
        if (code == MHD_CONNECTION_NOTIFY_CLOSED && http->connection[i].fd == info->connect_fd) {
            http->connection[i].fd = -1;
            http->closed = true;
            return;
        }
    }
}

static bool is_crowded(const struct mokd_http *http)
{
    for (size_t i = 0; i < MAX_CONNECTIONS; i++)
        if (http->connection[i].fd < 0)
            return false;
    return true;
}

/* libmicrohttpd notices, and closes them. */
static void end_old_connections(struct mokd_http *http)
{
    uint64_t now = mok_now_ns(), patience = is_crowded(http) ? CROWDED_NS : WHOLE_NS;

    for (size_t i = 0; i < MAX_CONNECTIONS; i++)
        if (http->connection[i].fd >= 0 && now - http->connection[i].since_ns > patience)
            shutdown(http->connection[i].fd, SHUT_RDWR);
}

/* ------------------------------------------------------------------ answers */

struct header {
    const char *name, *value;
};

static enum MHD_Result answer(struct MHD_Connection *connection, unsigned status, char *text, size_t length,
                              const char *type, const struct header *extra)
{
    static const struct header always[] = { { "Cache-Control", "no-store" },
                                            { "X-Content-Type-Options", "nosniff" },
                                            { "Referrer-Policy", "no-referrer" },
                                            { "Connection", "close" } };

    struct MHD_Response *response =
        text ? MHD_create_response_from_buffer(length, text, MHD_RESPMEM_MUST_FREE) : NULL;
    if (!response) { /* no memory: the connection ends */
        free(text);
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    for (size_t i = 0; i < ARRAY_SIZE(always); i++)
        MHD_add_response_header(response, always[i].name, always[i].value);
    if (extra)
        MHD_add_response_header(response, extra->name, extra->value);
    enum MHD_Result result = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result refuse(struct MHD_Connection *connection, unsigned status, const char *sentence,
                              const struct header *extra)
{
    char *text = strdup(sentence);
    return answer(connection, status, text, strlen(sentence), "text/plain; charset=utf-8", extra);
}

static const char *header_of(struct MHD_Connection *connection, const char *name)
{
    const char *value = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
    return value ? value : "";
}

static enum MHD_Result send_metrics(struct mokd_http *http, struct MHD_Connection *connection)
{
    const char *accept = header_of(connection, MHD_HTTP_HEADER_ACCEPT);
    bool old = strstr(accept, "text/plain") && !strstr(accept, "application/openmetrics-text");
    size_t length = 0;

    http->scrapes++;
    char *text = mokd_metrics_text(http->server, old ? MOKD_PROMETHEUS_TEXT : MOKD_OPENMETRICS, &length);
    return answer(connection, MHD_HTTP_OK, text, length,
                  old ? "text/plain; version=0.0.4; charset=utf-8"
                      : "application/openmetrics-text; version=1.0.0; charset=utf-8",
                  NULL);
}

static enum MHD_Result send_status(struct mokd_http *http, struct MHD_Connection *connection)
{
    size_t length = 0;
    char *text = mokd_status_json(http->server, &length);

    return answer(connection, MHD_HTTP_OK, text, length, "application/json", NULL);
}

/* Only the script and the style that carry the word of this very answer run. */
static enum MHD_Result send_page(struct MHD_Connection *connection)
{
    char word[33], policy[256];
    uint8_t random[16];
    size_t length = 0;

    if (getrandom(random, sizeof(random), 0) != sizeof(random))
        return MHD_NO;
    for (size_t i = 0; i < sizeof(random); i++)
        snprintf(word + 2 * i, 3, "%02x", random[i]);
    snprintf(policy, sizeof(policy),
             "default-src 'none'; script-src 'nonce-%s'; style-src 'nonce-%s'; connect-src 'self'; img-src data:; "
             "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
             word, word);
    struct header csp = { "Content-Security-Policy", policy };
    char *text = mokd_status_page(word, &length);
    return answer(connection, MHD_HTTP_OK, text, length, "text/html; charset=utf-8", &csp);
}

/*
 * A page of another site must not read ours by giving its own name our address: on a loopback address we are called by
 * address or localhost.
 */
static bool host_is_ours(const struct mokd_http *http, const char *host)
{
    static const char *const names[] = { "localhost", "127.", "[::1]" };

    if (!http->endpoint.loopback || http->endpoint.address.any.sa_family == AF_UNIX || !*host)
        return true;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        size_t length = strlen(names[i]);
        if (strncasecmp(host, names[i], length) != 0)
            continue;
        if (i == 1) /* digits and dots up to the port */
            return host[strspn(host, "0123456789.")] == ':' || !host[strspn(host, "0123456789.")];
        return host[length] == ':' || !host[length];
    }
    return false;
}

static enum MHD_Result on_request(void *cookie, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *upload_size, void **request)
{
    static const struct header allow = { "Allow", "GET, HEAD" };
    struct mokd_http *http = cookie;

    (void)version;
    (void)upload;
    (void)request;
    *upload_size = 0;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return refuse(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD\n", &allow);
    if (!host_is_ours(http, header_of(connection, MHD_HTTP_HEADER_HOST)))
        return refuse(connection, MHD_HTTP_FORBIDDEN, "on a loopback address, ask by address or as localhost\n", NULL);
    if (strcmp(url, "/metrics") == 0)
        return send_metrics(http, connection);
    if (strcmp(url, "/status.json") == 0)
        return send_status(http, connection);
    if (strcmp(url, "/") == 0)
        return send_page(connection);
    return refuse(connection, MHD_HTTP_NOT_FOUND, "there are /, /status.json and /metrics\n", NULL);
}

/* ------------------------------------------------------------------ the loop */

static void on_timer(uv_timer_t *timer);

static void run(struct mokd_http *http)
{
    MHD_UNSIGNED_LONG_LONG ms = 0;
    uint64_t look;

    do { /* a connection that goes makes room for one that waits, of which nothing else tells */
        http->closed = false;
        MHD_run(http->daemon);
    } while (http->closed);
    look = is_crowded(http) ? CROWDED_LOOK_MS : LOOK_MS;
    if (MHD_get_timeout(http->daemon, &ms) == MHD_YES)
        uv_timer_start(&http->timer, on_timer, ms < look ? ms : look, 0);
    else
        uv_timer_stop(&http->timer);
}

static void on_timer(uv_timer_t *timer)
{
    struct mokd_http *http = timer->data;

    end_old_connections(http);
    run(http);
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    run(poll->data);
}

/* ------------------------------------------------------------------ life */

static void http_free(struct mokd_http *http)
{
    if (http->daemon)
        MHD_stop_daemon(http->daemon);
    free(http);
}

static void handle_closed(uv_handle_t *handle)
{
    struct mokd_http *http = handle->data;

    if (--http->open_handles == 0)
        http_free(http);
}

/* Takes over the listening socket. */
static int start(struct mokd_http *http, int fd, struct mokd_error *error)
{
    /* What libmicrohttpd has to say about other people's connections is nobody's concern here. */
    http->daemon =
        MHD_start_daemon(MHD_USE_EPOLL, 0, NULL, NULL, on_request, http, MHD_OPTION_LISTEN_SOCKET, fd,
                         MHD_OPTION_CONNECTION_LIMIT, MAX_CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT, IDLE_S,
                         MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)REQUEST_BYTES, MHD_OPTION_NOTIFY_CONNECTION,
                         on_connection, http, MHD_OPTION_END);
    if (!http->daemon)
        return mokd_error_set(error, -MOK_EIO, "libmicrohttpd does not start");
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    if (!info || uv_poll_init(&http->server->loop, &http->poll, info->epoll_fd) < 0)
        return mokd_error_set(error, -MOK_EIO, "libmicrohttpd cannot be watched");
    uv_timer_init(&http->server->loop, &http->timer);
    http->poll.data = http->timer.data = http;
    http->open_handles = 2;
    uv_poll_start(&http->poll, UV_READABLE, on_ready);
    return 0;
}

int mokd_http_open(struct mokd_server *server, struct mokd_http **ret, struct mokd_error *error)
{
    const struct mokd_config *config = server->config;
    struct mokd_error why = { 0 };
    int fd = -1;

    *ret = NULL;
    if (!config->metrics_listen[0])
        return 0;
    struct mokd_http *http = calloc(1, sizeof(*http));
    if (!http)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    http->server = server;
    for (size_t i = 0; i < MAX_CONNECTIONS; i++)
        http->connection[i].fd = -1;
    int r = mokd_endpoint_parse(config->metrics_listen, &http->endpoint, &why);
    if (r == 0 && http->endpoint.off) {
        free(http);
        return 0;
    }
    if (r == 0)
        r = mokd_endpoint_listen(&http->endpoint, config->metrics_mode, &fd, &why);
    if (r == 0)
        r = start(http, fd, &why);
    if (r < 0) {
        http_free(http);
        return mokd_error_set(error, r, "[metrics] listen = %s: %s", config->metrics_listen, why.text);
    }
    mok_log(MOK_LOG_INFO, "metrics", "served", "listen=%s", config->metrics_listen);
    *ret = http;
    return 0;
}

void mokd_http_close(struct mokd_http *http)
{
    if (!http)
        return;
    mokd_endpoint_remove(&http->endpoint);
    uv_close((uv_handle_t *)&http->poll, handle_closed);
    uv_close((uv_handle_t *)&http->timer, handle_closed);
}
