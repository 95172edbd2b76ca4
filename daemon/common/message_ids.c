/* SPDX-License-Identifier: Apache-2.0 */
#include "message_ids.h"

#include <string.h>

#include "util.h"

const struct mok_message_id mok_message_ids[] = {
    { "server", "ready", "bac02bd1feb444eda7136b0d333ba927" },
    { "server", "stopping", "21cb5b27b8f24ea5940494d210db49a0" },
    { "server", "cannot start", "f20b2b0094a84f1ea600cda035640262" },
    { "session", "opened", "e0b508107604403899511a663377458e" },
    { "session", "closed", "fe779a44852d4403b16c420b1862e2fc" },
    { "session", "ended by mokd", "8697975d49824081a5e9079b321a088e" },
    { "session", "connection refused", "858981d7b37340eb86c4b971c393bb8a" },
    { "session", "resumed", "c43bc6e2b7f34da494b4bd7afa9377d3" },
    { "session", "not resumed", "9be044aa460644238324e9aa48121b20" },
    { "device", "up", "ed3983d7076c4458812312491fdc35f1" },
    { "device", "worker lost", "2902d4b74a524985b21525700849c3d3" },
    { "device", "failed", "c2a39ec0ac2c401886e44b9ced5bc0f6" },
    { "device", "no worker", "2f97a245b60041a0a9e47207f0a8aa54" },
    { "group", "ready", "c7afd2a180eb4e358472f5f6fe88b1de" },
    { "group", "failed", "b9a9dc44be4c4684a917bb644fc817cb" },
    { "group", "broken", "b307e8fb0a7246f88cc93339fcf8f913" },
    { "queue", "ended with its worker", "ccd54757bc4e4d298371800a04a0a8db" },
    { "listener", "connections are turned away", "44ad02d08f254291b21bd75f64a36b9c" },
    { "user", "causes too many lines: more about him are kept back", "7c92a449d21e4782866b7a2f73ed23e3" },
    { "rack", "a node has changed its state", "99913c2a8d6640668836ada247932f3e" },
    { "service", "the watchdog is not fed", "a34091366a734e3cb20922665d999482" },
    { "config", "reloaded", "39800ca97f0e44279d8f646dd8452b2c" },
    { "config", "not reloaded: what was read before holds", "8a503b99f09141df833e1cafa7328219" },
};
const size_t mok_message_id_count = ARRAY_SIZE(mok_message_ids);

const char *mok_message_id_of(const char *component, const char *message)
{
    for (size_t i = 0; i < mok_message_id_count; i++)
        if (strcmp(mok_message_ids[i].message, message) == 0 && strcmp(mok_message_ids[i].component, component) == 0)
            return mok_message_ids[i].id;
    return NULL;
}
