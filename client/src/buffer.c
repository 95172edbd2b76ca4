/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers: mokd makes and owns them, this side maps them. A child of fork gets no mapping, so none outlives a session.
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>

#include "cuda.h"
#include "fork.h"
#include "memory.h"
#include "port.h"
#include "session.h"

struct check_buffer buffer_facts(const mok_buffer *buffer)
{
    return (struct check_buffer){
        .id = buffer->id,
        .bytes = buffer->bytes,
        .place = { .session = buffer->session, .group = buffer->group, .device = buffer->device },
    };
}

void buffer_drop(mok_buffer *buffer)
{
    for (mok_buffer **at = &buffer->session->buffers; *at; at = &(*at)->next) {
        if (*at == buffer) {
            *at = buffer->next;
            break;
        }
    }
    if (buffer->cuda)
        cuda_unmap(buffer->cuda, buffer->data, buffer->bytes);
    else
        mok_memory_unmap(buffer->data, buffer->bytes);
    free(buffer);
}

static int buffer_map_fail(int code, uint64_t bytes)
{
    if (code == -MOK_ENOMEM)
        return client_fail(code, "no address space for the buffer's %" PRIu64 " bytes", bytes);
    return client_fail(code, "the memory that mokd sent for the buffer does not hold %" PRIu64 " sealed bytes", bytes);
}

static int buffer_map_host(mok_buffer *buffer, int fd)
{
    int r = mok_memory_map(fd, buffer->bytes, MOK_MAP_WRITE, &buffer->data);
    if (r == -MOK_ENOMEM)
        return r;
    if (r < 0)
        return -MOK_EPROTO;
    if (madvise(buffer->data, buffer->bytes, MADV_DONTFORK) < 0) {
        mok_memory_unmap(mok_take_pointer(&buffer->data), buffer->bytes);
        return -MOK_ENOMEM;
    }
    return 0;
}

static int buffer_map(mok_buffer *buffer, const Mok__BufferAllocReply *reply, int fd)
{
    if (reply->kind != MOK_DEVICE_CUDA) {
        int r = buffer_map_host(buffer, fd);
        return r < 0 ? buffer_map_fail(r, buffer->bytes) : 0;
    }
    if (reply->uuid.len != 16)
        return client_fail(MOK_EPROTO, "mokd sent a GPU's buffer without the GPU's UUID");
    int r = port_cuda(buffer->port, reply->uuid.data, reply->mps_pipe, &buffer->cuda);
    return r < 0 ? r : cuda_map(buffer->cuda, fd, buffer->bytes, &buffer->data);
}

static int buffer_release(mok_session *session, uint32_t id)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__BufferFree body = MOK__BUFFER_FREE__INIT;

    body.buffer = id;
    request.body_case = MOK__REQUEST__BODY_BUFFER_FREE;
    request.buffer_free = &body;
    return session_call(session, &request, MOK__REPLY__BODY__NOT_SET, 0, &answer);
}

static int buffer_alloc(mok_session *session, mok_group *group, uint32_t device, struct port *port, uint64_t bytes,
                        uint64_t timeout_ms, mok_buffer **ret_buffer)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    _cleanup_free_ mok_buffer *buffer = NULL;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__BufferAlloc body = MOK__BUFFER_ALLOC__INIT;

    if (!ret_buffer)
        return client_fail(MOK_EARG, "ret_buffer is NULL");
    if (bytes == 0 || bytes > PTRDIFF_MAX)
        return client_fail(MOK_ERANGE, "bytes is %" PRIu64 ", must be 1..%td", bytes, PTRDIFF_MAX);
    buffer = calloc(1, sizeof(*buffer));
    if (!buffer)
        return client_fail(MOK_ENOMEM, "no memory for a buffer's handle");

    body.group = group ? group->id : 0;
    body.device = device;
    body.bytes = bytes;
    body.timeout_ms = timeout_ms;
    request.body_case = MOK__REQUEST__BODY_BUFFER_ALLOC;
    request.buffer_alloc = &body;
    int r = group ? session_call_collective(session, &request, timeout_ms, MOK__REPLY__BODY_BUFFER_ALLOC, 1, &answer)
                  : session_call(session, &request, MOK__REPLY__BODY_BUFFER_ALLOC, 1, &answer);
    if (r < 0)
        return r;
    *buffer = (mok_buffer){
        .session = session,
        .group = group,
        .id = answer.reply->buffer_alloc->buffer,
        .device = device,
        .port = port,
        .bytes = bytes,
    };
    r = buffer_map(buffer, answer.reply->buffer_alloc, answer.fds.fd[0]);
    if (r < 0) {
        char why[320];
        snprintf(why, sizeof(why), "%s", client_last_error());
        buffer_release(session, buffer->id);
        return client_fail_text(r, why);
    }
    pthread_mutex_lock(&session->lock);
    buffer->next = session->buffers;
    session->buffers = buffer;
    pthread_mutex_unlock(&session->lock);
    *ret_buffer = mok_take_pointer(&buffer);
    return 0;
}

_public_ int mok_buffer_alloc_symmetric(mok_group *group, uint64_t bytes, uint64_t timeout_ms, mok_buffer **ret_buffer)
{
    int r = group_check(group);
    if (r < 0)
        return r;
    return buffer_alloc(group->session, group, group->device, group->port, bytes, timeout_ms, ret_buffer);
}

_public_ int mok_buffer_alloc_private(mok_session *session, uint32_t device, uint64_t bytes, mok_buffer **ret_buffer)
{
    struct port *port;

    int r = session_check(session, "session");
    if (r < 0)
        return r;
    r = port_get(session, device, &port, NULL);
    if (r < 0)
        return r;
    return buffer_alloc(session, NULL, device, port, bytes, 0, ret_buffer);
}

/* Under session->lock. */
static int buffer_idle(mok_buffer *buffer)
{
    if (buffer->bindings > 0)
        return client_fail(MOK_EBUSY, "buffer %" PRIu32 " is bound by %" PRIu32 " parameters of layers, must be by 0",
                           buffer->id, buffer->bindings);
    uint32_t operations = port_buffer_operations(buffer->port, buffer);
    if (operations > 0)
        return client_fail(MOK_EBUSY, "buffer %" PRIu32 " is used by %" PRIu32 " operations in flight, must be by 0",
                           buffer->id, operations);
    return 0;
}

_public_ int mok_buffer_free(mok_buffer *buffer)
{
    if (!buffer)
        return 0;
    int r = session_check(buffer->session, "buffer's session");
    if (r < 0)
        return r;
    mok_session *session = buffer->session;
    pthread_mutex_lock(&session->lock);
    r = buffer_idle(buffer);
    pthread_mutex_unlock(&session->lock);
    if (r < 0)
        return r;
    r = buffer_release(session, buffer->id);
    if (r == -MOK_EBUSY)
        return r;
    pthread_mutex_lock(&session->lock);
    buffer_drop(buffer);
    pthread_mutex_unlock(&session->lock);
    return r;
}

_public_ void *mok_buffer_data(const mok_buffer *buffer)
{
    return buffer && !fork_happened(buffer->session->fork_mark) ? buffer->data : NULL;
}

_public_ uint64_t mok_buffer_size(const mok_buffer *buffer)
{
    return buffer && !fork_happened(buffer->session->fork_mark) ? buffer->bytes : 0;
}
