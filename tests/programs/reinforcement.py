"""Agents that learn from tiny environments."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import tensorflow as tf
from catalogue import program
from material import mlp
from tensorflow.keras import layers

GAMMA = 0.95


class Pole:
    """A pole that falls unless it is pushed the other way."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = np.random.default_rng(seed)
        self.state = np.zeros(3)

    def reset(self) -> Any:
        self.state = self.generator.normal(size=3) * 0.1
        return self.state.copy()

    def step(self, action: Any) -> Any:
        angle, speed, place = self.state
        speed += 0.2 * angle + (0.1 if action else -0.1)
        state = np.array([angle + 0.2 * speed, speed, place + 0.1 * speed])
        self.state = np.clip(state, -1.5, 1.5)
        reward = 1.0 - abs(float(self.state[0]))
        return self.state.copy(), reward, bool(abs(self.state[0]) > 1.0)


@program
def reinforce(nano: Any, step: Any) -> Any:
    """Episodes of different lengths in NumPy, then one step on each with its returns."""
    policy = mlp(3, 8, 2)
    optimizer = tf.keras.optimizers.Adam(1e-2)

    def discounted(rewards):
        returns, running = np.zeros(len(rewards)), 0.0
        for t in reversed(range(len(rewards))):
            running = rewards[t] + GAMMA * running
            returns[t] = running
        return (returns - returns.mean()) / (returns.std() + 1e-8)

    @step
    @tf.function(reduce_retracing=True)
    def train_step(states, actions, returns):
        with tf.GradientTape() as tape:
            logits = policy(states)
            picked = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=actions, logits=logits)
            loss = tf.reduce_mean(picked * returns)
        grads = tape.gradient(loss, policy.trainable_variables)
        optimizer.apply_gradients(zip(grads, policy.trainable_variables, strict=True))
        return loss

    @nano
    def train(episodes):
        world = Pole()
        losses, lengths = [], []
        for episode in range(episodes):
            states, actions, rewards = [], [], []
            state = world.reset()
            for _ in range(9 + 4 * episode):
                probabilities = tf.nn.softmax(policy(state[None]))[0].numpy()
                action = int(np.random.uniform() < probabilities[1])
                following, reward, done = world.step(action)
                states.append(state)
                actions.append(action)
                rewards.append(reward)
                state = following
                if done:
                    break
            losses.append(train_step(np.array(states), np.array(actions), discounted(rewards)))
            lengths.append(len(rewards))
        return losses, lengths

    return train(3), policy.get_weights()


@program
def actor_critic(nano: Any, step: Any) -> Any:
    """A tape over the whole episode, lists of log probabilities (keras.io/examples/rl)."""
    inputs = layers.Input(shape=(3,))
    common = layers.Dense(8, activation="relu")(inputs)
    model = tf.keras.Model(
        inputs, [layers.Dense(2, activation="softmax")(common), layers.Dense(1)(common)]
    )
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)
    huber_loss = tf.keras.losses.Huber()
    world = Pole(4)

    @nano
    def train():
        running_reward = 0
        history = []
        for _episode in range(2):
            probs_history, critic_history, rewards = [], [], []
            state = world.reset()
            with tf.GradientTape() as tape:
                for _timestep in range(8):
                    state = tf.expand_dims(tf.convert_to_tensor(state), 0)
                    action_probs, critic_value = model(state)
                    critic_history.append(critic_value[0, 0])
                    action = np.random.choice(2, p=np.squeeze(action_probs))
                    probs_history.append(tf.math.log(action_probs[0, action]))
                    state, reward, _done = world.step(action)
                    rewards.append(reward)
                running_reward = 0.05 * sum(rewards) + (1 - 0.05) * running_reward
                returns, discounted_sum = [], 0
                for r in rewards[::-1]:
                    discounted_sum = r + GAMMA * discounted_sum
                    returns.insert(0, discounted_sum)
                returns = np.array(returns)
                returns = ((returns - np.mean(returns)) / (np.std(returns) + 1e-7)).tolist()
                actor_losses, critic_losses = [], []
                for log_prob, value, ret in zip(
                    probs_history, critic_history, returns, strict=True
                ):
                    actor_losses.append(-log_prob * (ret - value))
                    critic_losses.append(huber_loss(value[None], tf.constant([ret], tf.float64)))
                loss_value = sum(actor_losses) + sum(critic_losses)
            grads = tape.gradient(loss_value, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            history.append((float(loss_value), running_reward))
        return history

    return train(), model.get_weights()


@program
def actor_critic_tensor_array(nano: Any, step: Any) -> Any:
    """run_episode with TensorArrays and a numpy_function world (tutorials, actor_critic)."""
    model = mlp(3, 8, 3)
    optimizer = tf.keras.optimizers.Adam(1e-2)
    world = Pole(2)

    def env_step(action):
        state, reward, done = world.step(int(action))
        return state, np.array(reward), np.array(done, np.int64)

    def run_episode(state, max_steps):
        log_probs = tf.TensorArray(tf.float64, size=0, dynamic_size=True)
        values = tf.TensorArray(tf.float64, size=0, dynamic_size=True)
        rewards = tf.TensorArray(tf.float64, size=0, dynamic_size=True)
        for t in tf.range(max_steps):
            out = model(state[None])
            logits = out[:, :2]
            action = tf.random.categorical(logits, 1)[0, 0]
            log_probs = log_probs.write(t, tf.nn.log_softmax(logits)[0, action])
            values = values.write(t, out[0, 2])
            state, reward, _ = tf.numpy_function(
                env_step, [action], [tf.float64, tf.float64, tf.int64]
            )
            state.set_shape([3])
            rewards = rewards.write(t, reward)
        return log_probs.stack(), values.stack(), rewards.stack()

    def get_expected_return(rewards):
        n = tf.shape(rewards)[0]
        returns = tf.TensorArray(dtype=tf.float64, size=n)
        discounted_sum = tf.constant(0.0, tf.float64)
        for i in tf.range(n):
            discounted_sum = rewards[n - 1 - i] + GAMMA * discounted_sum
            discounted_sum.set_shape([])
            returns = returns.write(n - 1 - i, discounted_sum)
        returns = returns.stack()
        return (returns - tf.math.reduce_mean(returns)) / (tf.math.reduce_std(returns) + 1e-6)

    @tf.function
    def train_step(initial_state, max_steps):
        with tf.GradientTape() as tape:
            log_probs, values, rewards = run_episode(initial_state, max_steps)
            returns = get_expected_return(rewards)
            actor_loss = -tf.math.reduce_sum(log_probs * (returns - values))
            loss = actor_loss + tf.reduce_sum(tf.square(values - returns))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return tf.math.reduce_sum(rewards)

    @nano
    def train():
        rewards = deque(maxlen=2)
        for _ in range(3):
            initial_state = tf.constant(world.reset())
            rewards.append(float(train_step(initial_state, tf.constant(6))))
        return list(rewards)

    return train(), model.get_weights()


@program
def dqn(nano: Any, step: Any) -> Any:
    """A replay buffer in a deque, epsilon by hand, a target net (keras.io, deep_q_network)."""
    num_actions, batch_size = 2, 9
    model, model_target = mlp(3, 8, num_actions), mlp(3, 8, num_actions)
    model_target.set_weights(model.get_weights())
    optimizer = tf.keras.optimizers.Adam(learning_rate=5e-3, clipnorm=1.0)
    loss_function = tf.keras.losses.Huber()
    buffer = deque(maxlen=25)
    frame_count = 0

    @step
    @tf.function
    def update(state_sample, action_sample, updated_q_values):
        masks = tf.one_hot(action_sample, num_actions, dtype=tf.float64)
        with tf.GradientTape() as tape:
            q_values = model(state_sample)
            q_action = tf.reduce_sum(tf.multiply(q_values, masks), axis=1)
            loss = loss_function(updated_q_values, q_action)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @nano
    def play(frames):
        nonlocal frame_count
        world = Pole(8)
        epsilon = 1.0
        state = world.reset()
        losses = []
        for _ in range(frames):
            frame_count += 1
            if epsilon > np.random.rand(1)[0]:
                action = random.randrange(num_actions)
            else:
                action = int(tf.argmax(model(state[None])[0]))
            epsilon = max(epsilon - 0.03, 0.1)
            state_next, reward, done = world.step(action)
            buffer.append((state, action, reward, state_next, float(done)))
            state = world.reset() if done else state_next
            if frame_count > batch_size and frame_count % 4 == 0:
                sample = random.sample(list(buffer), batch_size)
                states, actions, rewards, following, dones = (
                    np.array(column) for column in zip(*sample, strict=True)
                )
                future = model_target(following).numpy().max(axis=1)
                losses.append(update(states, actions, rewards + GAMMA * future * (1 - dones)))
            if frame_count % 10 == 0:
                model_target.set_weights(model.get_weights())
        return losses

    losses = play(28)
    rewards = [entry[2] for entry in buffer]
    return losses, frame_count, rewards, model.get_weights(), model_target.get_weights()


@program
def ppo(nano: Any, step: Any) -> Any:
    """Clipped ratios, advantages normalized in the loop, shuffled minibatches (keras.io, ppo)."""
    actor, critic = mlp(3, 8, 2), mlp(3, 8, 1)
    policy_optimizer = tf.keras.optimizers.Adam(learning_rate=3e-3)
    value_optimizer = tf.keras.optimizers.Adam(learning_rate=1e-2)

    def logprobabilities(logits, a):
        all_ = tf.nn.log_softmax(logits)
        return tf.reduce_sum(tf.one_hot(a, 2, dtype=all_.dtype) * all_, axis=1)

    @step
    @tf.function
    def train_policy(observations, actions, old, advantages):
        with tf.GradientTape() as tape:
            new = logprobabilities(actor(observations), actions)
            ratio = tf.exp(new - old)
            clipped = tf.clip_by_value(ratio, 0.9, 1.1)
            objective = tf.minimum(ratio * advantages, clipped * advantages)
            policy_loss = -tf.reduce_mean(objective)
        grads = tape.gradient(policy_loss, actor.trainable_variables)
        policy_optimizer.apply_gradients(zip(grads, actor.trainable_variables, strict=True))
        return tf.reduce_mean(old - logprobabilities(actor(observations), actions))

    @step
    @tf.function
    def train_value_function(observations, returns):
        with tf.GradientTape() as tape:
            value_loss = tf.reduce_mean((returns - tf.squeeze(critic(observations), 1)) ** 2)
        grads = tape.gradient(value_loss, critic.trainable_variables)
        value_optimizer.apply_gradients(zip(grads, critic.trainable_variables, strict=True))
        return value_loss

    @nano
    def train(length):
        world = Pole(1)
        columns = {"o": [], "a": [], "p": [], "r": [], "v": []}
        observation = world.reset()
        for _ in range(length):
            logits = actor(observation[None])
            action = int(tf.random.categorical(logits, 1)[0, 0])
            columns["o"].append(observation)
            columns["a"].append(action)
            columns["p"].append(float(logprobabilities(logits, [action])[0]))
            columns["v"].append(float(critic(observation[None])[0, 0]))
            observation, reward, _ = world.step(action)
            columns["r"].append(reward)
        o, a, p, r, v = (np.array(columns[name]) for name in "oaprv")
        returns = np.array([np.sum(r[i:] * GAMMA ** np.arange(length - i)) for i in range(length)])
        advantages = returns - v
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-10)
        log = []
        for _ in range(2):
            order = np.random.permutation(length)
            for start in range(0, length, 10):
                i = order[start : start + 10]
                kl = train_policy(o[i], a[i], p[i], advantages[i])
                log.append((kl, train_value_function(o[i], returns[i])))
        return log

    return train(26), actor.get_weights(), critic.get_weights()


@program
def ddpg(nano: Any, step: Any) -> Any:
    """A buffer class with arrays, actor through critic, soft targets (keras.io, ddpg_pendulum)."""
    actor, target_actor = mlp(3, 8, 1, last="tanh"), mlp(3, 8, 1, last="tanh")
    critic, target_critic = mlp(4, 8, 1), mlp(4, 8, 1)
    target_actor.set_weights(actor.get_weights())
    target_critic.set_weights(critic.get_weights())
    critic_optimizer, actor_optimizer = (tf.keras.optimizers.Adam(rate) for rate in (5e-3, 2e-3))

    class Buffer:
        def __init__(self, capacity, batch_size):
            self.capacity = capacity
            self.batch_size = batch_size
            self.counter = 0
            self.states = np.zeros((capacity, 3))
            self.actions = np.zeros((capacity, 1))
            self.rewards = np.zeros((capacity, 1))
            self.following = np.zeros((capacity, 3))

        def record(self, state, action, reward, following):
            index = self.counter % self.capacity
            self.states[index] = state
            self.actions[index] = action
            self.rewards[index] = reward
            self.following[index] = following
            self.counter += 1

        def learn(self):
            indices = np.random.choice(min(self.counter, self.capacity), self.batch_size)
            return update(
                tf.convert_to_tensor(self.states[indices]),
                tf.convert_to_tensor(self.actions[indices]),
                tf.convert_to_tensor(self.rewards[indices]),
                tf.convert_to_tensor(self.following[indices]),
            )

    @step
    @tf.function
    def update(states, actions, rewards, following):
        with tf.GradientTape() as tape:
            target_actions = target_actor(following, training=True)
            future = target_critic(tf.concat([following, target_actions], 1), training=True)
            y = rewards + GAMMA * future
            critic_value = critic(tf.concat([states, actions], 1), training=True)
            critic_loss = tf.math.reduce_mean(tf.math.square(y - critic_value))
        grads = tape.gradient(critic_loss, critic.trainable_variables)
        critic_optimizer.apply_gradients(zip(grads, critic.trainable_variables, strict=True))
        with tf.GradientTape() as tape:
            chosen = actor(states, training=True)
            actor_loss = -tf.math.reduce_mean(critic(tf.concat([states, chosen], 1)))
        grads = tape.gradient(actor_loss, actor.trainable_variables)
        actor_optimizer.apply_gradients(zip(grads, actor.trainable_variables, strict=True))
        return critic_loss, actor_loss

    def update_target(target, original, tau):
        pairs = zip(target.get_weights(), original.get_weights(), strict=True)
        target.set_weights([a * (1 - tau) + b * tau for a, b in pairs])

    @nano
    def train():
        buffer = Buffer(20, 8)
        state, losses = np.array([0.1, 0.0, -0.1]), []
        for t in range(12):
            action = float(actor(state[None])[0, 0]) + np.random.normal(scale=0.2)
            following = state + 0.1 * np.array([state[1], action, state[0]])
            buffer.record(state, action, -np.sum(following**2), following)
            state = following
            if t >= 8:
                losses.append(buffer.learn())
                update_target(target_actor, actor, 0.05)
                update_target(target_critic, critic, 0.05)
        return losses, buffer.counter, buffer.rewards

    nets = (actor, critic, target_actor, target_critic)
    return train(), [net.get_weights() for net in nets]


@program
def bandit(nano: Any, step: Any) -> Any:
    """Preferences in one variable, updated by hand from sampled arms; no model, no dataset."""
    preferences = tf.Variable(tf.zeros(4, tf.float64))
    payoffs = tf.constant([0.1, 0.5, 0.9, 0.3], tf.float64)

    @step
    @tf.function
    def train_step(baseline):
        arms = tf.random.categorical(preferences[None], 15)[0]
        rewards = tf.gather(payoffs, arms)
        with tf.GradientTape() as tape:
            chosen = tf.gather(tf.nn.log_softmax(preferences), arms)
            loss = -tf.reduce_mean(chosen * (rewards - baseline))
        preferences.assign_sub(0.5 * tape.gradient(loss, preferences))
        return tf.reduce_mean(rewards)

    @nano
    def train(rounds):
        baseline, found = 0.0, []
        for _ in range(rounds):
            reward = float(train_step(tf.constant(baseline, tf.float64)))
            baseline += 0.3 * (reward - baseline)
            found.append(reward)
        return found, baseline

    return train(5), preferences
