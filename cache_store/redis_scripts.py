"""What the Redis store runs on the server: one script an operation, so that each is atomic and one round trip.

Every key a script touches is passed to it, and all keys of a namespace share a hash tag, so they also run in a cluster.
Hashes travel packed end to end. Times are the server's, so clocks of different machines are never compared.
Commands used: those of Redis 6.2.

    {NS}:engines        hash    engine id → its last status                 expires as a whole with the last engine
    {NS}:heard          zset    engine id, by the time it was heard of      the same
    {NS}:blocks:ID      set     hashes of the blocks the engine holds       expires with its heartbeats
                                and '', so that it exists while known       (or is evicted, and then begins anew)
    {NS}:sequence:ID    string  "instance number" of its last batch         the same
    {NS}:popular        zset    prefix, by forward-decayed uses             bounded; expires ten half-lives after a use
    {NS}:hot            hash    prefix → token ids and salt                 bounded, opt-in; the same
"""

from __future__ import annotations

UNPACK = """
local function unpack_hashes(packed)
    local hashes = {}
    for i = 1, #packed / 16 do
        hashes[i] = string.sub(packed, 16 * i - 15, 16 * i)
    end
    return hashes
end
"""

NOW = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
"""

# A server that is too old for look-ups, or takes no writes (it is full, or a replica), is of no use at all, and not of
# use now and then: what is asked of it at intervals fails there, too. The last key is nobody's: the second command is
# refused where writes are, and elsewhere changes nothing.
ONLY_OF_USE = """
redis.call('SMISMEMBER', KEYS[#KEYS], '')
redis.call('SETRANGE', KEYS[#KEYS], 0, '')
"""

# Blocks that are no set, or a sequence that is no string, are not known: the engine then publishes both anew, which
# replaces them.
# Keys: engines, heard, blocks, sequence, nobody's blocks. Arguments: engine id, instance, status, time to live in ms.
# An engine heard of in the future is one from before the server's clock was set back: if it lives, its next heartbeat
# brings it back; if it does not, it would else be announced until the clock has caught up.
ANNOUNCE = (
    ONLY_OF_USE
    + NOW
    + """
local ttl = tonumber(ARGV[4])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[2], string.format('%.6f', now), ARGV[1])
local function forget(from, to)
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], from, to)) do
        redis.call('HDEL', KEYS[1], id)
        redis.call('ZREM', KEYS[2], id)
    end
end
forget('-inf', string.format('(%.6f', now - ttl / 1000))
forget(string.format('(%.6f', now + ttl / 1000), '+inf')
for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, ttl)
end
local known = redis.call('TYPE', KEYS[3]).ok == 'set' and redis.pcall('GET', KEYS[4])
local instance = ARGV[2] .. ' '
if type(known) == 'string' and string.sub(known, 1, #instance) == instance then
    return tonumber(string.sub(known, #instance + 1))
end
return false
"""
)

# Keys: engines, heard, nobody's blocks. Arguments: time to live in ms. Statuses of the engines heard of in it, by id.
ENGINES = (
    ONLY_OF_USE
    + NOW
    + """
local ttl = tonumber(ARGV[1]) / 1000
local ids = redis.call('ZRANGEBYSCORE', KEYS[2], string.format('%.6f', now - ttl), string.format('%.6f', now + ttl))
if #ids == 0 then
    return {}
end
table.sort(ids)
return redis.call('HMGET', KEYS[1], unpack(ids))
"""
)

# Keys: blocks, sequence. Arguments: this batch's and the expected "instance number", whether to reset, time to live in
# ms, stored hashes, evicted hashes. 1 if the batch is applied, now or before.
PUBLISH = (
    UNPACK
    + """
local function change(command, packed)
    local hashes = unpack_hashes(packed)
    for first = 1, #hashes, 1000 do
        redis.call(command, KEYS[1], unpack(hashes, first, math.min(first + 999, #hashes)))
    end
end
local known = redis.call('TYPE', KEYS[1]).ok == 'set' and redis.pcall('GET', KEYS[2])
if known == ARGV[1] then
    return 1
end
if ARGV[3] == '0' and known ~= ARGV[2] then
    return 0
end
-- The first write is one that a server without memory refuses, so that it refuses the whole batch.
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[4])
if ARGV[3] == '1' then
    redis.call('UNLINK', KEYS[1])
    redis.call('SADD', KEYS[1], '')
end
change('SREM', ARGV[6])
change('SADD', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""
)

# Keys: the blocks of each engine. Arguments: a prompt's hashes. For each engine the number of leading ones in its set.
# Asked in growing portions, so that an engine that holds nothing costs one small question. A key of another type is an
# engine that holds nothing.
LOOKUP = (
    UNPACK
    + """
local hashes = unpack_hashes(ARGV[1])
local function count_held(key)
    local first, size = 1, 8
    while first <= #hashes do
        local last = math.min(first + size - 1, #hashes)
        local answer = redis.pcall('SMISMEMBER', key, unpack(hashes, first, last))
        if answer.err then
            if string.find(answer.err, 'WRONGTYPE', 1, true) then
                return 0
            end
            error(answer.err)
        end
        for i, held in ipairs(answer) do
            if held == 0 then
                return first + i - 2
            end
        end
        first, size = last + 1, math.min(4 * size, 1000)
    end
    return #hashes
end
local counts = {}
for i, key in ipairs(KEYS) do
    counts[i] = count_held(key)
end
return counts
"""
)

# Keys: popular, hot. Arguments: half-life in s, half-lives until a use is forgotten, time to live in ms, most prefixes,
# most prefixes with token ids; then for each use the prefix and its token ids, or an empty string. `memory_store` tells
# the scale of the scores.
RECORD = (
    NOW
    + """
now = now / tonumber(ARGV[1])
for i = 6, #ARGV, 2 do
    local score = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or '-inf')
    local low, high = math.min(score, now), math.max(score, now)
    score = high + math.log(1 + 2 ^ (low - high)) / math.log(2)
    redis.call('ZADD', KEYS[1], string.format('%.17g', score), ARGV[i])
    if ARGV[i + 1] ~= '' then
        redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
    end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.17g', now - tonumber(ARGV[2])))
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[4]))
if redis.call('HLEN', KEYS[2]) > tonumber(ARGV[5]) then
    local kept = {}
    for _, prefix in ipairs(redis.call('HKEYS', KEYS[2])) do
        kept[#kept + 1] = {tonumber(redis.call('ZSCORE', KEYS[1], prefix) or '-inf'), prefix}
    end
    table.sort(kept, function(a, b) return a[1] > b[1] end)
    for i = tonumber(ARGV[5]) + 1, #kept do
        redis.call('HDEL', KEYS[2], kept[i][2])
    end
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
"""
)

# Keys: popular, hot. Arguments: half-life in s, half-lives until a use is forgotten, most to return. Triples of prefix,
# decayed uses and token ids.
HOT = (
    NOW
    + """
now = now / tonumber(ARGV[1])
local oldest = string.format('%.17g', now - tonumber(ARGV[2]))
local ranked = redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', oldest, 'WITHSCORES', 'LIMIT', 0, ARGV[3])
local answer = {}
for i = 1, #ranked, 2 do
    local uses = string.format('%.17g', 2 ^ (tonumber(ranked[i + 1]) - now))
    answer[#answer + 1] = {ranked[i], uses, redis.call('HGET', KEYS[2], ranked[i])}
end
return answer
"""
)
