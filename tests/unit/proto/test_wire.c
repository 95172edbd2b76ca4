/* SPDX-License-Identifier: Apache-2.0 */
/* The control codec: whatever arrives, it is a message, a named error, or the end; and no descriptor goes astray. */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "control.pb-c.h"
#include "wire.h"

/* ------------------------------------------------------------------ allocation failure */

static long fail_after = -1; /* allocations of the codec that still succeed; < 0: all */

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size)
{
    if (fail_after >= 0 && fail_after-- == 0) {
        fail_after = 0;
        return NULL;
    }
    return __real_malloc(size);
}

/* ------------------------------------------------------------------ fixture */

struct link {
    int a, b;
    size_t fds_before;
};

static int set_up(void **state)
{
    static struct link link;
    int pair[2];
    link.fds_before = count_fds();
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    link.a = pair[0];
    link.b = pair[1];
    *state = &link;
    return 0;
}

/* Every test ends with as many descriptors as it began with. */
static int tear_down(void **state)
{
    struct link *link = *state;
    mok_close(link->a);
    mok_close(link->b);
    assert_int_equal(count_fds(), link->fds_before);
    return 0;
}

static void set_nonblocking(int fd)
{
    assert_int_equal(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK), 0);
}

static int open_null(void)
{
    int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

static const Mok__Request *hello(const char *job)
{
    static Mok__Hello body;
    static Mok__Request request;
    mok__hello__init(&body);
    mok__request__init(&request);
    body.protocol_min = 1;
    body.protocol_max = 7;
    body.job = (char *)job;
    request.id = 42;
    request.body_case = MOK__REQUEST__BODY_HELLO;
    request.hello = &body;
    return &request;
}

static int recv_request(int fd, Mok__Request **ret, struct mok_wire_fds *ret_fds)
{
    ProtobufCMessage *message;
    int r = mok_wire_recv(fd, &mok__request__descriptor, &message, ret_fds);
    if (r == 1)
        *ret = (Mok__Request *)message;
    return r;
}

/* For when a hello must be there. */
static Mok__Request *recv_hello(int fd, struct mok_wire_fds *ret_fds)
{
    Mok__Request *request = NULL;
    assert_int_equal(recv_request(fd, &request, ret_fds), 1);
    if (!request || request->body_case != MOK__REQUEST__BODY_HELLO)
        abort();
    return request;
}

static int recv_and_drop(int fd, struct mok_wire_fds *ret_fds)
{
    Mok__Request *request = NULL;
    int r = recv_request(fd, &request, ret_fds);
    if (r == 1)
        mok_wire_free(&request->base);
    return r;
}

static void send_raw(int fd, const void *bytes, size_t size)
{
    assert_int_equal(send(fd, bytes, size, MSG_NOSIGNAL), (ssize_t)size);
}

/* ------------------------------------------------------------------ messages */

static void a_message_arrives_as_it_was_sent(void **state)
{
    struct link *link = *state;

    assert_int_equal(mok_wire_send(link->a, &hello("train-7")->base, NULL, 0), 0);
    Mok__Request *request = recv_hello(link->b, NULL);
    assert_int_equal(request->id, 42);
    assert_string_equal(request->hello->job, "train-7");
    assert_int_equal(request->hello->protocol_max, 7);
    mok_wire_free(&request->base);
    mok_wire_free(NULL);
}

static void the_end_of_the_connection_is_told_apart_from_a_message(void **state)
{
    struct link *link = *state;

    link->a = mok_close(link->a);
    assert_int_equal(recv_and_drop(link->b, NULL), 0);
}

static void an_end_that_closed_with_our_packets_unread_is_an_end_like_any_other(void **state)
{
    struct link *link = *state;

    assert_int_equal(mok_wire_send(link->b, &hello("x")->base, NULL, 0), 0);
    link->a = mok_close(link->a);
    assert_int_equal(recv_and_drop(link->b, NULL), 0);
}

static void sending_to_an_end_that_is_gone_is_an_error_and_no_signal(void **state)
{
    struct link *link = *state;

    link->a = mok_close(link->a);
    assert_int_equal(mok_wire_send(link->b, &hello("x")->base, NULL, 0), -MOK_EDAEMON);
}

static void an_empty_packet_ends_the_connection(void **state)
{
    struct link *link = *state;

    send_raw(link->a, "", 0);
    assert_int_equal(recv_and_drop(link->b, NULL), 0);
}

static void a_non_blocking_socket_with_nothing_there_says_so(void **state)
{
    struct link *link = *state;

    set_nonblocking(link->b);
    assert_int_equal(recv_and_drop(link->b, NULL), -MOK_EAGAIN);
}

static void every_truncation_of_a_message_is_refused_or_whole(void **state)
{
    struct link *link = *state;
    uint8_t bytes[256];
    size_t size = mok__request__pack(hello("a-job-name"), bytes);
    size_t refused = 0;

    for (size_t cut = 1; cut < size; cut++) {
        send_raw(link->a, bytes, cut);
        int r = recv_and_drop(link->b, NULL);
        assert_true(r == 1 || r == -MOK_EPROTO);
        refused += r != 1;
    }
    assert_true(refused >= size - 4); /* all but the cuts between two fields */
}

static void garbage_is_refused(void **state)
{
    struct link *link = *state;
    const uint8_t wrong_wire_type[] = { 0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01 };
    const uint8_t too_long_string[] = { 0x12, 0xff, 0xff, 0xff, 0xff, 0x07, 'x' };

    send_raw(link->a, wrong_wire_type, sizeof(wrong_wire_type));
    assert_int_equal(recv_and_drop(link->b, NULL), -MOK_EPROTO);
    send_raw(link->a, too_long_string, sizeof(too_long_string));
    assert_int_equal(recv_and_drop(link->b, NULL), -MOK_EPROTO);
}

/*
 * Unknown fields at the top, in a message of a oneof and in a message within: what is sent on is what was understood.
 */
static void fields_of_a_newer_peer_are_dropped_at_every_depth(void **state)
{
    const uint8_t bytes[] = {
        0x08, 0x01,             /* id = 1 */
        0x62, 0x0e,             /* layer_bind */
        0x08, 0x07,             /*     layer = 7 */
        0x12, 0x07,             /*     params */
        0x0a, 0x02, 0x08, 0x05, /*         gate: buffer = 5 */
        0xf2, 0x7d, 0x00,       /*         field 2014, "" */
        0x92, 0x3f, 0x00,       /*     field 1010, "" */
        0xfa, 0x7d, 0x00,       /* field 2015, "" */
    };
    struct link *link = *state;
    ProtobufCMessage *message = NULL;

    send_raw(link->a, bytes, sizeof(bytes));
    assert_int_equal(mok_wire_recv(link->b, &mok__request__descriptor, &message, NULL), 1);
    const Mok__Request *request = (const Mok__Request *)message;
    assert_int_equal(request->body_case, MOK__REQUEST__BODY_LAYER_BIND);
    assert_int_equal(request->layer_bind->params->gate->buffer, 5);
    assert_int_equal(request->base.n_unknown_fields, 0);
    assert_int_equal(request->layer_bind->base.n_unknown_fields, 0);
    assert_int_equal(request->layer_bind->params->base.n_unknown_fields, 0);
    mok_wire_free(message);
}

static void a_packet_over_the_limit_is_refused(void **state)
{
    struct link *link = *state;
    _cleanup_free_ uint8_t *bytes = calloc(1, MOK_WIRE_MAX_BYTES + 1);

    send_raw(link->a, bytes, MOK_WIRE_MAX_BYTES + 1);
    assert_int_equal(recv_and_drop(link->b, NULL), -MOK_EPROTO);
}

static void a_message_over_the_limit_is_not_sent(void **state)
{
    struct link *link = *state;
    struct mok_wire_queue queue = { 0 };
    _cleanup_free_ char *name = calloc(1, MOK_WIRE_MAX_BYTES + 1);

    memset(name, 'n', MOK_WIRE_MAX_BYTES);
    assert_int_equal(mok_wire_send(link->a, &hello(name)->base, NULL, 0), -MOK_ESIZE);
    assert_int_equal(mok_wire_queue_send(&queue, link->a, &hello(name)->base, NULL, 0), -MOK_ESIZE);
    set_nonblocking(link->b);
    assert_int_equal(recv_and_drop(link->b, NULL), -MOK_EAGAIN);
}

static void the_largest_message_passes(void **state)
{
    struct link *link = *state;
    _cleanup_free_ char *name = calloc(1, MOK_WIRE_MAX_BYTES);

    memset(name, 'n', MOK_WIRE_MAX_BYTES - 1);
    size_t surplus = mok__request__get_packed_size(hello(name)) - MOK_WIRE_MAX_BYTES;
    name[MOK_WIRE_MAX_BYTES - 1 - surplus] = '\0';
    assert_int_equal(mok__request__get_packed_size(hello(name)), MOK_WIRE_MAX_BYTES);
    assert_int_equal(mok_wire_send(link->a, &hello(name)->base, NULL, 0), 0);
    Mok__Request *request = recv_hello(link->b, NULL);
    assert_string_equal(request->hello->job, name);
    mok_wire_free(&request->base);
}

/* Where the packed bytes have `placeholder`, they get a NUL. */
static void put_nuls(uint8_t *bytes, size_t size, char placeholder)
{
    for (uint8_t *at = bytes; (at = memchr(at, placeholder, (size_t)(bytes + size - at)));)
        *at = 0;
}

static void a_text_with_a_nul_inside_is_not_taken_for_what_stands_before_it(void **state)
{
    (void)state;
    Mok__DeviceInfo device[2] = { MOK__DEVICE_INFO__INIT, MOK__DEVICE_INFO__INIT };
    Mok__DeviceInfo *pointers[] = { &device[0], &device[1] };
    Mok__DeviceListReply list = MOK__DEVICE_LIST_REPLY__INIT;
    uint8_t uuid[16] = { 7 }, bytes[512];
    ProtobufCMessage *message = NULL;

    device[0].name = (char *)"gpu0#evil#";
    device[0].uuid = (ProtobufCBinaryData){ sizeof(uuid), uuid };
    device[1].name = (char *)"#";
    device[1].reason = (char *)"whole";
    list.n_device = 2;
    list.device = pointers;
    size_t size = mok__device_list_reply__pack(&list, bytes);
    assert_true(size <= sizeof(bytes));
    put_nuls(bytes, size, '#');
    assert_int_equal(mok_wire_unpack(&mok__device_list_reply__descriptor, bytes, size, &message), 0);
    const Mok__DeviceListReply *got = (const Mok__DeviceListReply *)message;
    assert_int_equal(got->n_device, 2);
    assert_string_equal(got->device[0]->name, "gpu0\x7f"
                                              "evil\x7f");
    assert_int_equal(got->device[0]->uuid.len, sizeof(uuid)); /* no text */
    assert_memory_equal(got->device[0]->uuid.data, uuid, sizeof(uuid));
    assert_string_equal(got->device[1]->name, "\x7f");
    assert_string_equal(got->device[1]->reason, "whole");
    mok_wire_free(message);
}

/* Two bytes a device on the wire, over a hundred in memory: 32,000 of them would take megabytes. */
static void report_32_a_small_packet_cannot_buy_much_memory(void **state)
{
    (void)state;
    ProtobufCMessage *message = NULL;
    size_t size = 64000;
    _cleanup_free_ uint8_t *bytes = malloc(size);

    for (size_t i = 0; i < size; i += 2) {
        bytes[i] = 0x0a; /* field 1, length-delimited */
        bytes[i + 1] = 0;
    }
    assert_int_equal(mok_wire_unpack(&mok__device_list_reply__descriptor, bytes, size, &message), -MOK_EPROTO);
    assert_int_equal(mok_wire_unpack(&mok__device_list_reply__descriptor, bytes, 2000, &message), 0);
    assert_int_equal(((Mok__DeviceListReply *)message)->n_device, 1000);
    mok_wire_free(message);
}

static void running_out_of_memory_at_any_point_is_an_error_that_leaks_nothing(void **state)
{
    struct link *link = *state;
    int null = open_null();
    int r;
    long n = 0;

    do {
        struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
        assert_int_equal(mok_wire_send(link->a, &hello("memory")->base, &null, 1), 0);
        fail_after = n++;
        r = recv_and_drop(link->b, &fds);
        fail_after = -1;
        if (r == 1) {
            assert_int_equal(fds.count, 1);
            mok_wire_fds_close(&fds);
        } else {
            assert_int_equal(r, -MOK_ENOMEM);
            assert_int_equal(count_fds(), link->fds_before + 3);
            if (n == 1) /* failed before it looked: the message is still there */
                assert_int_equal(recv_and_drop(link->b, NULL), -MOK_EPROTO);
        }
    } while (r != 1);
    assert_true(n > 3);
    mok_close(null);
}

/* ------------------------------------------------------------------ descriptors */

static void descriptors_arrive_in_order_and_close_on_exec(void **state)
{
    struct link *link = *state;
    struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    struct stat want, got;
    int pipes[2];

    assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
    const int sent[] = { pipes[0], link->a };
    assert_int_equal(mok_wire_send(link->a, &hello("x")->base, sent, 2), 0);
    assert_int_equal(recv_and_drop(link->b, &fds), 1);
    assert_int_equal(fds.count, 2);
    for (size_t i = 0; i < 2; i++) {
        fstat(sent[i], &want);
        fstat(fds.fd[i], &got);
        assert_int_equal(want.st_ino, got.st_ino);
        assert_true(fcntl(fds.fd[i], F_GETFD) & FD_CLOEXEC);
    }
    int taken = mok_wire_fds_take(&fds, 1);
    assert_true(taken >= 0);
    assert_int_equal(mok_wire_fds_take(&fds, 1), -1);
    assert_int_equal(mok_wire_fds_take(&fds, 2), -1);
    mok_wire_fds_close(&fds);
    assert_true(fcntl(taken, F_GETFD) >= 0);
    mok_close(taken);
    mok_close(pipes[0]);
    mok_close(pipes[1]);
}

static void as_many_descriptors_as_the_kernel_carries_pass_and_one_more_is_refused(void **state)
{
    struct link *link = *state;
    struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    int null = open_null();
    int many[MOK_WIRE_MAX_FDS + 1];

    for (size_t i = 0; i < ARRAY_SIZE(many); i++)
        many[i] = null;
    assert_int_equal(mok_wire_send(link->a, &hello("x")->base, many, ARRAY_SIZE(many)), -MOK_ERANGE);
    assert_int_equal(mok_wire_send(link->a, &hello("x")->base, many, MOK_WIRE_MAX_FDS), 0);
    assert_int_equal(recv_and_drop(link->b, &fds), 1);
    assert_int_equal(fds.count, MOK_WIRE_MAX_FDS);
    mok_wire_fds_close(&fds);
    mok_close(null);
}

static void descriptors_where_none_belong_are_refused_and_never_get_in(void **state)
{
    struct link *link = *state;
    int null = open_null();

    assert_int_equal(mok_wire_send(link->a, &hello("x")->base, &null, 1), 0);
    assert_int_equal(recv_and_drop(link->b, NULL), -MOK_EPROTO);
    mok_close(null);
}

static void descriptors_of_a_malformed_message_are_closed(void **state)
{
    struct link *link = *state;
    struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    Mok__Reply reply = MOK__REPLY__INIT;
    int null = open_null();

    /* A reply's field 3 is text, a request's field 3 a message: these bytes are no request. */
    reply.id = 1;
    reply.text = (char *)"\xff\xff\xff";
    assert_int_equal(mok_wire_send(link->a, &reply.base, &null, 1), 0);
    assert_int_equal(recv_and_drop(link->b, &fds), -MOK_EPROTO);
    assert_int_equal(fds.count, 0);
    mok_close(null);
}

static void too_few_or_too_many_descriptors_are_refused_and_closed(void **state)
{
    struct link *link = *state;
    int null = open_null();
    const int sent[] = { null, null };

    for (size_t expected = 0; expected < 5; expected++) {
        struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
        assert_int_equal(mok_wire_send(link->a, &hello("x")->base, sent, 2), 0);
        assert_int_equal(recv_and_drop(link->b, &fds), 1);
        assert_int_equal(mok_wire_fds_expect(&fds, expected), expected == 2 ? 0 : -MOK_EPROTO);
        assert_int_equal(fds.count, expected == 2 ? 2 : 0);
        mok_wire_fds_close(&fds);
    }
    mok_close(null);
}

static rlim_t limit_fds(rlim_t limit)
{
    struct rlimit now;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &now), 0);
    rlim_t before = now.rlim_cur;
    now.rlim_cur = limit;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &now), 0);
    return before;
}

/* The lowest descriptor number that is free: a limit of this + n leaves room for n descriptors at most. */
static int first_free_fd(void)
{
    int fd = open_null();
    mok_close(fd);
    return fd;
}

static void report_24_at_the_descriptor_limit_the_receiver_gets_a_named_error_and_leaks_nothing(void **state)
{
    struct link *link = *state;
    int null = open_null();
    const int sent[] = { null, null, null };

    for (int room = 0; room <= 3; room++) {
        struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
        assert_int_equal(mok_wire_send(link->a, &hello("x")->base, sent, 3), 0);
        rlim_t before = limit_fds((rlim_t)(first_free_fd() + room));
        int r = recv_and_drop(link->b, &fds);
        limit_fds(before);
        assert_int_equal(r, room < 3 ? -MOK_EFDS : 1);
        assert_int_equal(fds.count, room < 3 ? 0 : 3);
        mok_wire_fds_close(&fds);
        assert_int_equal(count_fds(), link->fds_before + 3);
    }
    mok_close(null);
}

/* ------------------------------------------------------------------ messages that wait */

static void fill_socket(int fd)
{
    int r;
    do
        r = mok_wire_send(fd, &hello("filler")->base, NULL, 0);
    while (r == 0);
    assert_int_equal(r, -MOK_EAGAIN);
}

static void drain_fillers(int fd)
{
    set_nonblocking(fd);
    int r;
    do {
        Mok__Request *request = NULL;
        r = recv_request(fd, &request, NULL);
        if (r == 1 && request) {
            assert_string_equal(request->hello->job, "filler");
            mok_wire_free(&request->base);
        }
    } while (r == 1);
    assert_int_equal(r, -MOK_EAGAIN);
}

static void messages_that_do_not_fit_wait_in_order_with_their_descriptors(void **state)
{
    struct link *link = *state;
    struct mok_wire_queue queue = { 0 };
    char name[16];

    set_nonblocking(link->a);
    fill_socket(link->a);
    for (int i = 0; i < 10; i++) {
        int null = open_null();
        snprintf(name, sizeof(name), "job-%d", i);
        assert_int_equal(mok_wire_queue_send(&queue, link->a, &hello(name)->base, &null, i % 2), 1);
        mok_close(null); /* the queue has its own */
    }
    assert_int_equal(queue.packets, 10);
    assert_int_equal(mok_wire_queue_flush(&queue, link->a), 1);
    drain_fillers(link->b);
    assert_int_equal(mok_wire_queue_flush(&queue, link->a), 0);
    assert_int_equal(queue.packets, 0);
    assert_int_equal(queue.bytes, 0);

    for (int i = 0; i < 10; i++) {
        struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
        snprintf(name, sizeof(name), "job-%d", i);
        Mok__Request *request = recv_hello(link->b, &fds);
        assert_string_equal(request->hello->job, name);
        assert_int_equal(fds.count, i % 2);
        mok_wire_fds_close(&fds);
        mok_wire_free(&request->base);
    }
    assert_int_equal(mok_wire_queue_send(&queue, link->a, &hello("at once")->base, NULL, 0), 0);
}

static void an_end_that_never_reads_meets_the_bound_of_the_queue(void **state)
{
    struct link *link = *state;
    struct mok_wire_queue queue = { .max_bytes = 1000 };
    int null = open_null();
    int r;

    set_nonblocking(link->a);
    fill_socket(link->a);
    do
        r = mok_wire_queue_send(&queue, link->a, &hello("x")->base, &null, 1);
    while (r == 1);
    assert_int_equal(r, -MOK_EQUOTA);
    assert_true(queue.bytes <= 1000 && queue.bytes > 900);
    mok_wire_queue_clear(&queue);
    assert_int_equal(queue.packets, 0);
    mok_close(null);
}

static void descriptors_that_wait_have_a_bound_of_their_own(void **state)
{
    struct link *link = *state;
    struct mok_wire_queue queue = { .max_fds = 3 };
    int null = open_null();
    const int sent[] = { null, null };

    set_nonblocking(link->a);
    fill_socket(link->a);
    assert_int_equal(mok_wire_queue_send(&queue, link->a, &hello("x")->base, sent, 2), 1);
    assert_int_equal(mok_wire_queue_send(&queue, link->a, &hello("x")->base, sent, 2), -MOK_EQUOTA);
    assert_int_equal(mok_wire_queue_send(&queue, link->a, &hello("x")->base, sent, 1), 1);
    assert_int_equal(mok_wire_queue_send(&queue, link->a, &hello("x")->base, NULL, 0), 1);
    mok_wire_queue_drop(&queue);
    assert_int_equal(queue.packets, 2);
    assert_int_equal(mok_wire_queue_send(&queue, link->a, &hello("x")->base, sent, 2), 1);
    mok_wire_queue_clear(&queue);
    assert_int_equal(queue.fds, 0);
    mok_close(null);
}

static void a_message_whose_descriptors_cannot_be_kept_is_refused_and_leaks_nothing(void **state)
{
    struct link *link = *state;
    struct mok_wire_queue queue = { 0 };
    int null = open_null();
    const int sent[] = { null, null, null };

    set_nonblocking(link->a);
    fill_socket(link->a);
    rlim_t before = limit_fds((rlim_t)(first_free_fd() + 2));
    int r = mok_wire_queue_send(&queue, link->a, &hello("x")->base, sent, 3);
    limit_fds(before);
    assert_int_equal(r, -MOK_EFDS);
    assert_int_equal(queue.packets, 0);
    mok_close(null);
}

static void flushing_to_an_end_that_is_gone_is_an_error(void **state)
{
    struct link *link = *state;
    struct mok_wire_queue queue = { 0 };

    set_nonblocking(link->a);
    fill_socket(link->a);
    assert_int_equal(mok_wire_queue_send(&queue, link->a, &hello("x")->base, NULL, 0), 1);
    link->b = mok_close(link->b);
    assert_int_equal(mok_wire_queue_flush(&queue, link->a), -MOK_EDAEMON);
    mok_wire_queue_clear(&queue);
}

/* ------------------------------------------------------------------ the other end */

/* socketpair()'s ends both name the process that made it, so the child listens for itself. */
static void the_other_end_is_known_by_the_kernels_word_and_by_a_pidfd(void **state)
{
    (void)state;
    struct mok_wire_peer peer = { .pidfd = -1 };
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct sockaddr_un_abstract {
        sa_family_t family;
        char path[32];
    } address = { .family = AF_UNIX };
    snprintf(address.path + 1, sizeof(address.path) - 1, "mok-test-%d", (int)getpid());
    assert_int_equal(bind(listener, (void *)&address, sizeof(address)), 0);
    assert_int_equal(listen(listener, 1), 0);

    pid_t child = fork();
    if (child == 0) {
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        char byte;
        _exit(connect(fd, (void *)&address, sizeof(address)) || read(fd, &byte, 1));
    }
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(mok_wire_peer_query(fd, &peer), 0);
    assert_int_equal(peer.pid, child);
    assert_int_equal(peer.uid, getuid());
    assert_int_equal(peer.gid, getgid());
    assert_true(fcntl(peer.pidfd, F_GETFD) & FD_CLOEXEC);

    struct pollfd look = { .fd = peer.pidfd, .events = POLLIN };
    assert_int_equal(poll(&look, 1, 0), 0);
    mok_close(fd);
    assert_int_equal(poll(&look, 1, 5000), 1);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    mok_close(peer.pidfd);
    mok_close(listener);
}

static void what_is_no_socket_has_no_other_end(void **state)
{
    (void)state;
    struct mok_wire_peer peer;
    int null = open_null();

    assert_int_equal(mok_wire_peer_query(null, &peer), -MOK_EIO);
    mok_close(null);
}

#define link_test(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        link_test(a_message_arrives_as_it_was_sent),
        link_test(the_end_of_the_connection_is_told_apart_from_a_message),
        link_test(a_text_with_a_nul_inside_is_not_taken_for_what_stands_before_it),
        link_test(an_end_that_closed_with_our_packets_unread_is_an_end_like_any_other),
        link_test(sending_to_an_end_that_is_gone_is_an_error_and_no_signal),
        link_test(an_empty_packet_ends_the_connection),
        link_test(a_non_blocking_socket_with_nothing_there_says_so),
        link_test(every_truncation_of_a_message_is_refused_or_whole),
        link_test(garbage_is_refused),
        link_test(fields_of_a_newer_peer_are_dropped_at_every_depth),
        link_test(a_packet_over_the_limit_is_refused),
        link_test(a_message_over_the_limit_is_not_sent),
        link_test(the_largest_message_passes),
        link_test(report_32_a_small_packet_cannot_buy_much_memory),
        link_test(running_out_of_memory_at_any_point_is_an_error_that_leaks_nothing),
        link_test(descriptors_arrive_in_order_and_close_on_exec),
        link_test(as_many_descriptors_as_the_kernel_carries_pass_and_one_more_is_refused),
        link_test(descriptors_where_none_belong_are_refused_and_never_get_in),
        link_test(descriptors_of_a_malformed_message_are_closed),
        link_test(too_few_or_too_many_descriptors_are_refused_and_closed),
        link_test(report_24_at_the_descriptor_limit_the_receiver_gets_a_named_error_and_leaks_nothing),
        link_test(messages_that_do_not_fit_wait_in_order_with_their_descriptors),
        link_test(an_end_that_never_reads_meets_the_bound_of_the_queue),
        link_test(descriptors_that_wait_have_a_bound_of_their_own),
        link_test(a_message_whose_descriptors_cannot_be_kept_is_refused_and_leaks_nothing),
        link_test(flushing_to_an_end_that_is_gone_is_an_error),
        link_test(the_other_end_is_known_by_the_kernels_word_and_by_a_pidfd),
        link_test(what_is_no_socket_has_no_other_end),
    };
    return cmocka_run_group_tests_name("wire", tests, NULL, NULL);
}
